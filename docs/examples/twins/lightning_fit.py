"""The training of `lightning_trainer.py` by `phasetrain.fit`, with the same LightningModule."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phasetrain

L.seed_everything(0)
inputs = torch.randn(64, 8)


class Net(L.LightningModule):
    """A regression."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the optimizer and its schedule, by updates."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8)
phasetrain.fit(Net(), loader, epochs=5, CHECKPOINT={"every_updates": 5}, RUN={"dir": "run"})
