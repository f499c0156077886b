"""A loop with Accelerate, which saves after every five updates and skips what was trained."""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
accelerator = Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
update, counter = 0, Path("state/update.json")
if counter.exists():
    accelerator.load_state("state")
    update = json.loads(counter.read_text())
epoch, skip = divmod(update, len(loader))
while update < 40:
    batches = accelerator.skip_first_batches(loader, skip) if skip else loader
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        schedule.step()
        update += 1
        if update % 5 == 0:
            accelerator.save_state("state")
            counter.write_text(json.dumps(update))
    skip = 0
