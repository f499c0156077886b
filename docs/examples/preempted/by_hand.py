"""A plain loop that saves after every ten updates and resumes, as many scripts do.

`phasetrain audit -- python by_hand.py` names what it does not restore.
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.randn(1800, 64)
classes = (points @ torch.randn(64, 10)).argmax(1)
loader = DataLoader(TensorDataset(points, classes), 64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
epoch = update = 0
if Path("last.pt").exists():
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    epoch, update = state["epoch"], state["update"]

while epoch < 4:
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update += 1
        if update % 10 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch, "update": update}, "last.pt")
    epoch += 1
