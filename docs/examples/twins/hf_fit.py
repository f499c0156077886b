"""The training of `hf_trainer.py` by `phasetrain.fit`, with the same dataset of Hugging Face."""

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import set_seed

import phasetrain

set_seed(0)
inputs = torch.randn(64, 8)
data = Dataset.from_dict({"inputs": inputs, "labels": inputs[:, :1]}).with_format("torch")


class Net(nn.Module):
    """A regression that returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs, labels=None):
        """Return the loss and the output."""
        output = self.net(inputs)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


model = Net()
phasetrain.fit(
    model,
    DataLoader(data, 8),
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True),
    epochs=5,
    LOSS={"name": "from_model", "with_target": True},
    DATA={"TRAIN": {"inputs": "inputs", "targets": "labels"}},
    OPTIMIZER={"clip_norm": 1.0},
    CHECKPOINT={"every_updates": 5},
    RUN={"dir": "run"},
)
