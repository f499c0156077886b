"""Lightning, which saves after every five updates and resumes from the last checkpoint."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
last = "checkpoints/last.ckpt"
trainer = L.Trainer(
    max_epochs=5,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=5)],
)
trainer.fit(Net(), loader, ckpt_path=last if Path(last).exists() else None)
