"""Training scripts of `benchmarks/audit_faults.py`: clean ones, and faults as replacements of text.

A script is exact: killed and started again, it makes the updates of a run that was not killed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

PLAIN = """\
import copy, os, random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

SEED, SIZE, BATCH, UPDATES, EVERY = 0, 64, 8, 36, 5
torch.manual_seed(SEED); np.random.seed(SEED); random.seed(SEED)


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SIZE, 8, generator=generator)
        self.epoch = 0

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.epoch + index)
        noise = 0.1 * torch.randn(8, generator=generator)
        return self.inputs[index] + noise, self.inputs[index, :1] * 2 + 0.1


class Order(Sampler):
    epoch = start = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(SEED + self.epoch)
        return iter(torch.randperm(SIZE, generator=generator).tolist()[self.start :])

    def __len__(self):
        return SIZE - self.start


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 1)

    def forward(self, inputs):
        return self.head(self.drop(self.body(inputs)))


data, order = Points(), Order()
loader = DataLoader(data, BATCH, sampler=order, generator=torch.Generator())
model = Net()
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7)
update = epoch = 0


def save():
    state = {
        "model": model.state_dict(),
        "ema": ema.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": scaler.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "update": update,
    }
    torch.save(state, "last.tmp")
    os.replace("last.tmp", "last.pt")


def load():
    global update
    state = torch.load("last.pt", weights_only=False)
    model.load_state_dict(state["model"])
    ema.load_state_dict(state["ema"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    update = state["update"]


if os.path.exists("last.pt"):
    load()
epoch, order.start = update * BATCH // SIZE, update * BATCH % SIZE
while update < UPDATES:
    order.epoch = data.epoch = epoch
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        with torch.no_grad():
            for mean, weight in zip(ema.parameters(), model.parameters()):
                mean.lerp_(weight, 0.1)
        update += 1
        if update % EVERY == 0:
            save()
        if update == UPDATES:
            break
    epoch += 1
    order.start = 0
print("loss", loss.item())
"""
"""A loop with a sampler of its own, dropout, batch norm, AdamW, a schedule, a scaler and an EMA."""

DDP = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIZE, BATCH, UPDATES, EVERY = 64, 4, 28, 5
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
inputs = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs[:, :1])
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
update = 0


def save():
    generators = [None] * world
    dist.all_gather_object(generators, torch.get_rng_state())
    if rank == 0:
        state = {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "generators": generators,
            "update": update,
        }
        torch.save(state, "last.tmp")
        os.replace("last.tmp", "last.pt")


def load():
    global update
    state = torch.load("last.pt", weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generators"][rank])
    update = state["update"]


if os.path.exists("last.pt"):
    load()
steps = len(loader)
while update < UPDATES:
    done = update % steps
    sampler.set_epoch(update // steps)
    for index, (x, y) in enumerate(loader):
        if index < done:
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        update += 1
        if update % EVERY == 0:
            save()
        if update == UPDATES:
            break
dist.destroy_process_group()
"""
"""A loop with DistributedDataParallel and a DistributedSampler; each rank has its own dropout."""


@dataclass(frozen=True)
class Script:
    """A training script for the audit.

    Attributes:
        name: what is planted, or what is special.
        text: the script.
        expected: codes of findings of which the first one must be one; empty for a clean script.
        part: text that must occur in the part or the sentence of the first finding.
        full: also ask about workers, a second kill and a torn checkpoint.
        exit_code: of the audit.
        ranks: number of processes that torchrun starts; 0: it is started directly.
    """

    name: str
    text: str
    expected: Sequence[str] = ()
    part: str = ""
    full: bool = False
    exit_code: int = field(default=-1)
    ranks: int = 0

    @property
    def code(self) -> int:
        """The expected exit code."""
        return self.exit_code if self.exit_code >= 0 else int(bool(self.expected))

    @property
    def command(self) -> list[str]:
        """The command to audit, in the folder with the script as `train.py`."""
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher = [*launcher, "--nproc-per-node", str(self.ranks)] if self.ranks else []
        return [sys.executable, *launcher, "train.py"]


def change(text: str, *pairs: tuple[str, str]) -> str:
    """Return a text with replacements, each of which must apply.

    Raises:
        ValueError: one does not.
    """
    for old, new in pairs:
        if old not in text:
            raise ValueError(f"not in the script: {old}")
        text = text.replace(old, new)
    return text


def plant(
    name: str, expected: str, *pairs: tuple[str, str], part: str = "", **more: bool | int
) -> Script:
    """Return the plain script with a fault."""
    return Script(name, change(PLAIN, *pairs), expected.split(), part, **more)  # type: ignore[arg-type]


NUMPY_NOISE = (
    "noise = 0.1 * torch.randn(8, generator=generator)",
    "noise = torch.tensor(0.1 * np.random.randn(8), dtype=torch.float32)",
)
PYTHON_NOISE = (
    "noise = 0.1 * torch.randn(8, generator=generator)",
    "noise = 0.1 * random.random()",
)
SGD = (
    "torch.optim.AdamW(model.parameters(), lr=1e-2)",
    "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)",
)
BY_HAND = (
    ("        schedule.step()\n", ""),
    (
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        optimizer.param_groups[0]['lr'] = 1e-2 / (1 + steps)\n        steps += 1\n",
    ),
    ("update = epoch = 0\n", "update = epoch = steps = 0\n"),
)
ACCUMULATE = (
    ("        optimizer.zero_grad()\n", ""),
    (
        "        scaler.step(optimizer)\n        scaler.update()\n        schedule.step()\n",
        "        micro += 1\n        if micro % 4 == 0:\n            scaler.step(optimizer)\n"
        "            scaler.update()\n            schedule.step()\n            optimizer.zero_grad()\n",
    ),
    ("update = epoch = 0\n", "update = epoch = micro = 0\n"),
    ("UPDATES, EVERY = 0, 64, 8, 36, 5", "UPDATES, EVERY = 0, 64, 8, 96, 10"),
    ('"update": update,', '"update": update, "micro": micro,'),
    ('update = state["update"]', 'update = state["update"]\n    micro = state["micro"]'),
    ("    global update\n", "    global update, micro\n"),
)
TARGET = (
    (
        "ema = copy.deepcopy(model)\n",
        "ema = copy.deepcopy(model)\ntarget = copy.deepcopy(model).eval()\n",
    ),
    (
        "nn.functional.mse_loss(model(inputs), targets)",
        "nn.functional.mse_loss(model(inputs), targets + 0.1 * target(inputs).detach())",
    ),
    (
        "        update += 1\n",
        "        update += 1\n        if update % 6 == 0:\n            target.load_state_dict(model.state_dict())\n",
    ),
)
QUEUE = (
    (
        "        self.drop = nn.Dropout(0.2)\n",
        "        self.drop = nn.Dropout(0.2)\n        self.register_buffer('queue', torch.zeros(16), persistent=False)\n",
    ),
    (
        "        return self.head(self.drop(self.body(inputs)))",
        "        hidden = self.drop(self.body(inputs))\n        output = self.head(hidden + self.queue)\n"
        "        self.queue = hidden.detach().mean(0)\n        return output",
    ),
)
WORKERS = (
    "DataLoader(data, BATCH, sampler=order, generator=torch.Generator())",
    "DataLoader(data, BATCH, sampler=order, num_workers=1)",
)

TWO_OPTIMIZERS = (
    (
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n",
        "optimizer = torch.optim.AdamW(model.body.parameters(), lr=1e-2)\n"
        "second = torch.optim.SGD(model.head.parameters(), lr=1e-2, momentum=0.9)\n",
    ),
    (
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        second.zero_grad()\n",
    ),
    (
        "        scaler.step(optimizer)\n",
        "        scaler.step(optimizer)\n        scaler.step(second)\n",
    ),
    ('"update": update,', '"update": update, "second": second.state_dict(),'),
    (
        'update = state["update"]',
        'update = state["update"]\n    second.load_state_dict(state["second"])',
    ),
)
STREAM = (
    ("import DataLoader, Dataset, Sampler", "import DataLoader, Dataset, IterableDataset, Sampler"),
    (
        "class Net(nn.Module):",
        "class Stream(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter([data[index] for index in order])\n\n\nclass Net(nn.Module):",
    ),
    (
        "DataLoader(data, BATCH, sampler=order, generator=torch.Generator())",
        "DataLoader(Stream(), BATCH, generator=torch.Generator())",
    ),
)
SHUFFLED = (
    ("sampler=order, generator=torch.Generator()", "shuffle=True, generator=shuffle"),
    (
        "data, order = Points(), Order()\n",
        "data, order, shuffle = Points(), Order(), torch.Generator()\n",
    ),
    (
        "    order.epoch = data.epoch = epoch\n",
        "    data.epoch = epoch\n    begun = shuffle.get_state()\n    skip, order.start = order.start, 0\n",
    ),
    (
        "        optimizer.zero_grad()\n",
        "        if skip:\n            skip -= BATCH\n            continue\n        optimizer.zero_grad()\n",
    ),
    (
        '"update": update,',
        '"update": update, "shuffle": shuffle.get_state() if update % (SIZE // BATCH) == 0 else begun,',
    ),
    (
        'update = state["update"]',
        'update = state["update"]\n    shuffle.set_state(state["shuffle"])',
    ),
)
BFLOAT16 = (
    (
        "        loss = nn.functional.mse_loss(model(inputs), targets)\n",
        '        with torch.autocast("cpu", torch.bfloat16):\n'
        "            output = model(inputs)\n"
        "        loss = nn.functional.mse_loss(output.float(), targets)\n",
    ),
)
AVERAGED = (
    ("copy.deepcopy(model)", "torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)"),
    (
        "model = Net()\n",
        "model = Net()\naverage = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)\n",
    ),
    (
        "        with torch.no_grad():\n"
        "            for mean, weight in zip(ema.parameters(), model.parameters()):\n"
        "                mean.lerp_(weight, 0.1)\n",
        "        ema.update_parameters(model)\n",
    ),
)
CLOSURE = (
    (
        "torch.optim.AdamW(model.parameters(), lr=1e-2)",
        "torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3)",
    ),
    (
        "        optimizer.zero_grad()\n"
        "        loss = nn.functional.mse_loss(model(inputs), targets)\n"
        "        scaler.scale(loss).backward()\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n",
        "        def closure():\n"
        "            optimizer.zero_grad()\n"
        "            loss = nn.functional.mse_loss(model(inputs), targets)\n"
        "            loss.backward()\n"
        "            return loss\n"
        "        loss = optimizer.step(closure)\n",
    ),
)
PLATEAU = (
    (
        "CosineAnnealingLR(optimizer, UPDATES)",
        "ReduceLROnPlateau(optimizer, patience=1)",
    ),
    ("        schedule.step()\n", "        schedule.step(loss.detach())\n"),
)

FAULTS = [
    plant(
        "the loader starts its epoch again",
        "samples",
        ("update * BATCH // SIZE, update * BATCH % SIZE", "update * BATCH // SIZE, 0"),
        part="starts its epoch again",
    ),
    plant(
        "epochs are counted from 0 after a resume",
        "samples",
        ("epoch, order.start = update * BATCH // SIZE,", "epoch, order.start = 0,"),
    ),
    plant(
        "a global shuffle without its generator",
        "samples",
        ("sampler=order, generator=torch.Generator()", "shuffle=True"),
        ('    torch.set_rng_state(state["torch"])\n', ""),
    ),
    plant(
        "the resume skips a batch",
        "samples",
        ('update = state["update"]', 'update = state["update"] + 1'),
        part="skipped",
    ),
    plant(
        "the resume begins with the next epoch",
        "samples",
        (
            "update * BATCH // SIZE, update * BATCH % SIZE",
            "update * BATCH // SIZE + bool(update), 0",
        ),
    ),
    plant(
        "the checkpoint is written before the optimizer step",
        "samples",
        (
            "        update += 1\n        if update % EVERY == 0:\n            save()\n",
            "        update += 1\n",
        ),
        (
            "        optimizer.zero_grad()\n",
            "        optimizer.zero_grad()\n        if (update + 1) % EVERY == 0:\n            update += 1; save(); update -= 1\n",
        ),
    ),
    plant("accumulated gradients are lost", "samples", *ACCUMULATE, part="batches"),
    plant(
        "one layer is not restored",
        "weights",
        (
            '    model.load_state_dict(state["model"])\n',
            '    model.load_state_dict({k: v for k, v in state["model"].items() if k != "head.weight"}, strict=False)\n',
        ),
    ),
    plant(
        "weights are saved in half precision",
        "weights",
        (
            '"model": model.state_dict(),',
            '"model": {k: v.half() for k, v in model.state_dict().items()},',
        ),
    ),
    plant(
        "a layer that was frozen trains after the resume",
        "weights",
        (
            "        update += 1\n",
            "        update += 1\n        if update == 8:\n            model.head.requires_grad_(False)\n",
        ),
    ),
    plant(
        "running statistics are not saved",
        "buffers",
        ('"model": model.state_dict(),', '"model": dict(model.named_parameters()),'),
        (
            'model.load_state_dict(state["model"])',
            'model.load_state_dict(state["model"], strict=False)',
        ),
    ),
    plant("a buffer is not persistent", "buffers", *QUEUE),
    plant(
        "the optimizer is not restored",
        "optimizer",
        ('    optimizer.load_state_dict(state["optimizer"])\n', ""),
    ),
    plant(
        "the second moment is not restored",
        "optimizer",
        (
            "    schedule.load_state_dict(",
            '    for moments in optimizer.state.values():\n        moments["exp_avg_sq"].zero_()\n    schedule.load_state_dict(',
        ),
        part="second moment",
    ),
    plant(
        "momentum is not restored",
        "optimizer",
        SGD,
        (
            '    optimizer.load_state_dict(state["optimizer"])\n',
            '    optimizer.load_state_dict({**state["optimizer"], "state": {}})\n',
        ),
        part="momentum",
    ),
    plant(
        "the step count of Adam is not restored",
        "optimizer",
        (
            "    schedule.load_state_dict(",
            '    for moments in optimizer.state.values():\n        moments["step"].fill_(1)\n    schedule.load_state_dict(',
        ),
        part="count of steps",
    ),
    plant(
        "the schedule is not restored",
        "schedule option",
        ('    schedule.load_state_dict(state["schedule"])\n', ""),
    ),
    plant(
        "the schedule is stepped twice",
        "schedule option",
        (
            '    schedule.load_state_dict(state["schedule"])\n',
            '    schedule.load_state_dict(state["schedule"])\n    schedule.step()\n',
        ),
    ),
    plant(
        "a counter behind the learning rate is not saved", "option", *BY_HAND, part="learning rate"
    ),
    plant(
        "a changed weight decay is not restored",
        "option",
        (
            "        update += 1\n",
            "        update += 1\n        optimizer.param_groups[0]['weight_decay'] = 0.001 * update\n",
        ),
        (
            '    optimizer.load_state_dict(state["optimizer"])\n',
            '    optimizer.load_state_dict(state["optimizer"])\n    optimizer.param_groups[0]["weight_decay"] = 0.01\n',
        ),
        part="weight_decay",
    ),
    plant(
        "the scaler is not restored",
        "scaler",
        ('    scaler.load_state_dict(state["scaler"])\n', ""),
    ),
    plant(
        "torch's generator is not restored",
        "generator",
        ('    torch.set_rng_state(state["torch"])\n', ""),
        part="torch",
    ),
    plant(
        "the DataLoader draws from the restored generator",
        "generator",
        ("sampler=order, generator=torch.Generator()", "sampler=order"),
        part="torch",
    ),
    plant(
        "NumPy's generator is not restored",
        "content generator",
        NUMPY_NOISE,
        ('    np.random.set_state(state["numpy"])\n', ""),
    ),
    plant(
        "Python's generator is not restored",
        "content generator",
        PYTHON_NOISE,
        ('    random.setstate(state["python"])\n', ""),
    ),
    plant(
        "augmentation in workers draws from their seed",
        "content",
        WORKERS,
        ("torch.randn(8, generator=generator)", "torch.randn(8)"),
    ),
    plant(
        "a generator of a module is not restored",
        "loss",
        (
            "self.drop(self.body(inputs))",
            "self.body(inputs) * (1 + 0.1 * torch.randn(16, generator=self.noise))",
        ),
        (
            "        self.drop = nn.Dropout(0.2)\n",
            "        self.drop = nn.Dropout(0.2)\n        self.noise = torch.Generator().manual_seed(5)\n",
        ),
        ("ema = copy.deepcopy(model)", "ema = Net()\nema.load_state_dict(model.state_dict())"),
    ),
    plant("a target network is not restored", "loss buffers", *TARGET),
    plant(
        "a weight of the loss that grows is not restored",
        "loss",
        (
            "nn.functional.mse_loss(model(inputs), targets)",
            "factor * nn.functional.mse_loss(model(inputs), targets)",
        ),
        ("        update += 1\n", "        update += 1\n        factor += 0.1\n"),
        ("update = epoch = 0\n", "update = epoch = 0\nfactor = 1.0\n"),
    ),
    plant(
        "the EMA is not restored",
        "checkpoint",
        (
            '    ema.load_state_dict(state["ema"])\n',
            "    ema.load_state_dict(model.state_dict())\n",
        ),
        part="ema",
    ),
    plant(
        "the resumed run trains too long",
        "length",
        (
            "while update < UPDATES:",
            "total = update + UPDATES - (update > 0)\nwhile update < total:",
        ),
        ("        if update == UPDATES:", "        if update == total:"),
    ),
    plant("nothing is loaded", "start", ('if os.path.exists("last.pt"):\n    load()\n', "")),
    plant(
        "the load fails",
        "failed",
        (
            '    model.load_state_dict(state["model"])\n',
            '    model.load_state_dict(state["weights"])\n',
        ),
    ),
    plant(
        "the checkpoint is written in place",
        "torn_save",
        (
            '    torch.save(state, "last.tmp")\n    os.replace("last.tmp", "last.pt")\n',
            '    torch.save(state, "last.pt")\n',
        ),
        full=True,
    ),
    plant(
        "a seed from the time",
        "",
        (
            "SEED, SIZE, BATCH, UPDATES, EVERY = 0,",
            "import time\nSEED, SIZE, BATCH, UPDATES, EVERY = time.time_ns() % 2**31,",
        ),
        exit_code=3,
    ),
    plant(
        "the order of a set of strings",
        "",
        (
            "torch.randperm(SIZE, generator=generator).tolist()",
            "[int(word) for word in {str(n) for n in range(SIZE)}]",
        ),
        exit_code=3,
    ),
    plant(
        "no checkpoint",
        "",
        ("        if update % EVERY == 0:\n            save()\n", ""),
        exit_code=2,
    ),
    Script(
        "two ranks: no set_epoch after a resume",
        change(
            DDP,
            ("update = 0\n", "update = begin = 0\n"),
            ("    load()\nsteps", "    load()\n    begin = update\nsteps"),
            ("set_epoch(update // steps)", "set_epoch((update - begin) // steps)"),
        ),
        ["samples"],
        ranks=2,
    ),
    Script(
        "two ranks: the generator of rank 1 is not restored",
        change(DDP, ('state["generators"][rank]', 'state["generators"][0]')),
        ["generator"],
        "Rank 1: ",
        ranks=2,
    ),
]
"""Faults in the plain script."""

PLAIN_TWIN = """\
import phasetrain
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED, SIZE, BATCH, UPDATES, EVERY = 0, 64, 8, 36, 5
torch.manual_seed(SEED)


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SIZE, 8, generator=generator)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        noise = 0.1 * torch.randn(8)
        return self.inputs[index] + noise, self.inputs[index, :1] * 2 + 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 1)

    def forward(self, inputs):
        return self.head(self.drop(self.body(inputs)))


model = Net()
phasetrain.fit(
    model,
    train=DataLoader(Points(), BATCH, shuffle=True),
    loss=nn.MSELoss(),
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    epochs=5,
    OPTIMIZER={"SCHEDULES": {"lr": {"name": "cosine"}}},
    MODEL={"ema": {"decay": 0.9, "test": False}},
    CHECKPOINT={"every_updates": EVERY},
    RUN={"dir": "run"},
)
"""

LIGHTNING_TWIN = """\
import phasetrain
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, inputs):
        return self.net(inputs)


loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8, shuffle=True)
model = Net()
phasetrain.fit(
    model,
    train=loader,
    loss=nn.MSELoss(),
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    epochs=5,
    OPTIMIZER={"SCHEDULES": {"lr": {"name": "cosine"}}},
    CHECKPOINT={"every_updates": 5},
    RUN={"dir": "run"},
)
"""

TRAINER_PARTS = """\
class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"inputs": inputs[index], "labels": inputs[index, :1]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, inputs, labels=None):
        output = self.net(inputs)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}
"""
"""Dataset and network of the scripts with the Hugging Face Trainer, and of their twin."""

TRAINER_TWIN = (
    """\
import phasetrain
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)


"""
    + TRAINER_PARTS
    + """\


model = Net()
phasetrain.fit(
    model,
    train=DataLoader(Points(), 8, shuffle=True),
    LOSS={"name": "from_model", "with_target": True},
    DATA={"TRAIN": {"inputs": "inputs", "targets": "labels"}},
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    epochs=5,
    OPTIMIZER={"SCHEDULES": {"lr": {"name": "linear", "end": 0.0}}},
    CHECKPOINT={"every_updates": 5},
    RUN={"dir": "run"},
)
"""
)

ACCELERATE_TWIN = """\
import phasetrain
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8, shuffle=True)
phasetrain.fit(
    model,
    train=loader,
    loss=nn.MSELoss(),
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    epochs=5,
    OPTIMIZER={"SCHEDULES": {"lr": {"name": "cosine"}}},
    CHECKPOINT={"every_updates": 5},
    RUN={"dir": "run"},
)
"""

CLEAN = [
    Script("plain", PLAIN, full=True),
    Script("two ranks: DistributedDataParallel", DDP, ranks=2),
    Script("SGD with momentum", change(PLAIN, SGD)),
    Script("NumPy's generator for augmentation", change(PLAIN, NUMPY_NOISE)),
    Script(
        "accumulation, saved between updates",
        change(
            PLAIN, *ACCUMULATE, ("        if update % EVERY == 0:", "        if update % 8 == 0:")
        ),
    ),
    Script(
        "two workers",
        change(
            PLAIN, ("generator=torch.Generator())", "generator=torch.Generator(), num_workers=2)")
        ),
        full=True,
    ),
    Script(
        "a target network, saved",
        change(
            PLAIN,
            *TARGET,
            ('"update": update,', '"update": update, "target": target.state_dict(),'),
            (
                'update = state["update"]',
                'update = state["update"]\n    target.load_state_dict(state["target"])',
            ),
        ),
    ),
    Script(
        "checkpoints at the ends of epochs",
        change(PLAIN, ("EVERY = 0, 64, 8, 36, 5", "EVERY = 0, 64, 8, 36, 8")),
    ),
    Script(
        "a learning rate by hand, its counter saved",
        change(
            PLAIN,
            *BY_HAND,
            ('"update": update,', '"update": update, "steps": steps,'),
            ('update = state["update"]', 'update = state["update"]\n    steps = state["steps"]'),
            ("    global update\n", "    global update, steps\n"),
        ),
    ),
    Script(
        "a generator that nothing draws from",
        change(
            PLAIN,
            ("nn.Dropout(0.2)", "nn.Identity()"),
            ('    torch.set_rng_state(state["torch"])\n', ""),
        ),
    ),
    Script(
        "tests between epochs",
        change(
            PLAIN,
            (
                "    epoch += 1\n",
                "    model.eval()\n    with torch.no_grad():\n        for inputs, targets in DataLoader(data, 16, generator=torch.Generator()):\n            model(inputs)\n    model.train()\n    epoch += 1\n",
            ),
        ),
    ),
    Script("two optimizers", change(PLAIN, *TWO_OPTIMIZERS)),
    Script("an IterableDataset that continues", change(PLAIN, *STREAM)),
    Script(
        "a shuffled DataLoader with its own generator, batches skipped", change(PLAIN, *SHUFFLED)
    ),
    Script("autocast with bfloat16", change(PLAIN, *BFLOAT16)),
    Script("an AveragedModel of torch", change(PLAIN, *AVERAGED)),
    Script("LBFGS with a closure", change(PLAIN, *CLOSURE)),
    Script("ReduceLROnPlateau", change(PLAIN, *PLATEAU)),
    Script("phasetrain, the twin of the plain script", PLAIN_TWIN),
    Script(
        "phasetrain, the twin of the plain script, resumed with two workers",
        change(
            PLAIN_TWIN,
            ("shuffle=True)", "shuffle=True, num_workers=2 * os.path.exists('run'))"),
            ("import phasetrain\n", "import os\nimport phasetrain\n"),
        ),
    ),
    Script("phasetrain, the twin of the Lightning script", LIGHTNING_TWIN),
    Script("phasetrain, the twin of the Hugging Face script", TRAINER_TWIN),
    Script("phasetrain, the twin of the Accelerate script", ACCELERATE_TWIN),
]
"""Scripts without a fault."""
