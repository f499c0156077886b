"""The training of `accelerate_loop.py` by `phasetrain.fit`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phasetrain

torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
phasetrain.fit(
    model,
    train=loader,
    loss=nn.MSELoss(),
    optimizer=optimizer,
    epochs=5,
    OPTIMIZER={"SCHEDULES": {"lr": {"name": "cosine"}}},
    CHECKPOINT={"every_updates": 5},
    RUN={"dir": "run"},
)
