"""A loop without a framework, which saves after every five updates."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
update = 0
if Path("last.pt").exists():
    state = torch.load("last.pt")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    update = state["update"]
while update < 40:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
        update += 1
        if update % 5 == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "update": update}, "last.tmp")
            Path("last.tmp").replace("last.pt")
        if update == 40:
            break
