"""What `by_hand.py` trains, by `phasetrain.fit`, which saves and resumes."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phasetrain

torch.manual_seed(0)
points = torch.randn(1800, 64)
classes = (points @ torch.randn(64, 10)).argmax(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
phasetrain.fit(
    model,
    train=TensorDataset(points, classes),
    batch_size=64,
    loss="cross_entropy",
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    epochs=4,
    CHECKPOINT={"every_updates": 10},
    RUN={"dir": "run"},
)
