"""An engine of Ignite, which saves after every five updates."""

from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)


def step(engine, batch):
    """Make an update."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.item()


trainer = Engine(step)
parts = {"trainer": trainer, "model": model, "optimizer": optimizer, "schedule": schedule}
saver = DiskSaver("checkpoints", require_empty=False)
handler = Checkpoint(
    parts, saver, n_saved=1, global_step_transform=lambda *_: trainer.state.iteration
)
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), handler)
for path in Path("checkpoints").iterdir():
    state = torch.load(path, weights_only=False)
    Checkpoint.load_objects(to_load=parts, checkpoint=state)
trainer.run(loader, max_epochs=5)
