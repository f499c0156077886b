"""Training scripts of `benchmarks/audit_faults.py` that use frameworks.

`RELEASED` resume as the documentation of each framework says, `CLEAN` are the ones that are made
exact, and `FAULTS` are planted in these.
"""

from audit_scripts import TRAINER_PARTS, Script, change

TORCHVISION = """\
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""First lines for machines whose torchvision is of another build of torch."""

LIGHTNING = """\
import os
import pytorch_lightning as L
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(0)
inputs = torch.randn(64, 8)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8, shuffle=True)
last = "checkpoints/last.ckpt"
trainer = L.Trainer(
    max_steps=36,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=5)],
)
trainer.fit(Net(), loader, ckpt_path=last if os.path.exists(last) else None)
"""

TRAINER = f"""\
import os
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

set_seed(0)
inputs = torch.randn(64, 8)


{TRAINER_PARTS}

arguments = TrainingArguments(
    "checkpoints", per_device_train_batch_size=8, max_steps=36, save_steps=5, use_cpu=True,
    learning_rate=1e-2, report_to=[], disable_tqdm=True, seed=0,
)
trainer = Trainer(Net(), arguments, train_dataset=Points())
saved = os.path.isdir("checkpoints") and bool(os.listdir("checkpoints"))
trainer.train(resume_from_checkpoint=saved)
"""

ACCELERATE = """\
import json, os
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
inputs = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8, shuffle=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
accelerator = Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
update = 0
if os.path.exists("state/update.json"):
    accelerator.load_state("state")
    update = json.load(open("state/update.json"))
epoch, skip = divmod(update, len(loader))
while update < 36:
    loader.set_epoch(epoch)
    batches = accelerator.skip_first_batches(loader, skip) if skip else loader
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        update += 1
        if update % 5 == 0:
            accelerator.save_state("state")
            json.dump(update, open("state/update.json", "w"))
        if update == 36:
            break
    epoch, skip = epoch + 1, 0
"""

IGNITE = """\
import os
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

manual_seed(0)
inputs = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), 8, shuffle=True)


def step(engine, batch):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.item()


trainer = Engine(step)
parts = {"trainer": trainer, "model": model, "optimizer": optimizer, "schedule": schedule}
saver = DiskSaver("checkpoints", require_empty=False)
handler = Checkpoint(parts, saver, n_saved=1, global_step_transform=lambda *_: trainer.state.iteration)
trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), handler)
os.makedirs("checkpoints", exist_ok=True)
for name in os.listdir("checkpoints"):
    state = torch.load(f"checkpoints/{name}", weights_only=False)
    Checkpoint.load_objects(to_load=parts, checkpoint=state)
trainer.run(loader, max_epochs=5)
"""
DETERMINISTIC = (
    (
        "from ignite.handlers",
        "from ignite.engine.deterministic import DeterministicEngine\nfrom ignite.handlers",
    ),
    ("trainer = Engine(step)", "trainer = DeterministicEngine(step)"),
)
STATEFUL = (
    (
        "from torch.utils.data import DataLoader, TensorDataset",
        "from torch.utils.data import TensorDataset\nfrom torchdata.stateful_dataloader import StatefulDataLoader",
    ),
    ("loader = DataLoader(", "loader = StatefulDataLoader("),
)

PLAIN_STATEFUL = """\
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

torch.manual_seed(0)
inputs = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
loader = StatefulDataLoader(TensorDataset(inputs, inputs[:, :1]), 8, shuffle=True)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
update = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt", weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["torch"])
    update = state["update"]
while update < 36:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
        update += 1
        if update % 5 == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"torch": torch.get_rng_state(), "update": update}
            torch.save(state, "last.tmp")
            os.replace("last.tmp", "last.pt")
        if update == 36:
            break
"""
"""A loop without a framework, with the loader of torchdata."""

LITDATA = change(
    PLAIN_STATEFUL,
    (
        "from torch.utils.data import TensorDataset\n"
        "from torchdata.stateful_dataloader import StatefulDataLoader\n",
        "from litdata import StreamingDataLoader, StreamingDataset\n"
        "from litdata.streaming.writer import BinaryWriter\n",
    ),
    (
        "torch.manual_seed(0)\ninputs = torch.randn(64, 8)\n",
        "torch.manual_seed(0)\n"
        "if not os.path.exists('data'):\n"
        "    writer = BinaryWriter('data', chunk_size=16)\n"
        "    for index in range(64):\n"
        "        x = torch.randn(8, generator=torch.Generator().manual_seed(index))\n"
        "        writer[index] = (x, x[:1])\n"
        "    writer.done()\n"
        "    writer.merge()\n",
    ),
    (
        "loader = StatefulDataLoader(TensorDataset(inputs, inputs[:, :1]), 8, shuffle=True)\n",
        "data = StreamingDataset('data', shuffle=True, seed=0)\n"
        "loader = StreamingDataLoader(data, batch_size=8)\n",
    ),
)
"""The same loop with the dataset and the loader of litData."""

TITAN = """\
import os
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

torch.manual_seed(0)
inputs = torch.randn(64, 8)


class Points(IterableDataset, Stateful):
    def __init__(self):
        self.next = 0

    def __iter__(self):
        while True:
            while self.next < 64:
                self.next += 1
                yield inputs[self.next - 1], inputs[self.next - 1, :1]
            self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Part(Stateful):
    def __init__(self, read, write):
        self.state_dict, self.load_state_dict = read, write


class Steps(Stateful):
    update = 0

    def state_dict(self):
        return {"update": self.update}

    def load_state_dict(self, state):
        self.update = state["update"]


model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / 37)
loader = StatefulDataLoader(Points(), 8)
steps = Steps()
parts = {
    "model": Part(lambda: get_model_state_dict(model), lambda s: set_model_state_dict(model, s)),
    "optimizer": Part(
        lambda: get_optimizer_state_dict(model, optimizer),
        lambda s: set_optimizer_state_dict(model, optimizer, s),
    ),
    "lr_scheduler": schedule,
    "dataloader": loader,
    "train_state": steps,
}
saved = sorted(os.listdir("checkpoint")) if os.path.isdir("checkpoint") else []
saved = [name for name in saved if os.path.exists(f"checkpoint/{name}/.metadata")]
if saved:
    dcp.load(parts, checkpoint_id=f"checkpoint/{saved[-1]}")
batches = iter(loader)
while steps.update < 36:
    x, y = next(batches)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    steps.update += 1
    if steps.update % 5 == 0:
        dcp.save(parts, checkpoint_id=f"checkpoint/step-{steps.update:03d}")
"""
"""The loop of torchtitan: distributed checkpoints of stateful parts, its loader; no dropout."""

OLMO = """\
import os
import numpy as np
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
from olmo_core.train.callbacks import CheckpointerCallback
from olmo_core.train.train_module import TransformerTrainModuleConfig

# What torchrun would set for one process.
os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "FS_LOCAL_RANK": "0"})
os.environ.update({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "NUM_NODES": "1"})


def main():
    prepare_training_environment(seed=0, backend=None)
    np.random.RandomState(0).randint(0, 100, 64 * 32).astype(np.uint8).tofile("tokens.npy")
    tokenizer = TokenizerConfig(vocab_size=128, eos_token_id=0, pad_token_id=1)
    model = TransformerConfig.llama_like(
        d_model=32, vocab_size=tokenizer.padded_vocab_size(), n_layers=2, n_heads=2
    ).build(init_device="cpu")
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=8 * 32,
        max_sequence_length=32,
        optim=AdamWConfig(lr=1e-3),
        max_grad_norm=1.0,
        scheduler=CosWithWarmup(warmup_steps=5),
    ).build(model)
    data = NumpyFSLDatasetConfig(
        tokenizer=tokenizer, sequence_length=32, paths=["tokens.npy"], work_dir="work"
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=8 * 32, seed=0).build(data)
    saver = CheckpointerCallback(save_interval=1000, ephemeral_save_interval=5, save_async=False)
    TrainerConfig(
        save_folder="checkpoints",
        save_overwrite=True,
        max_duration=Duration.epochs(4),
        callbacks={"checkpointer": saver},
    ).build(module, loader).fit()


if __name__ == "__main__":
    main()
"""
"""OLMo-core's trainer with a small transformer, which has no dropout, on 64 sequences."""

MMENGINE = """\
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

load = torch.load
torch.load = lambda *args, **kwargs: load(*args, **{"weights_only": False, **kwargs})
torch.manual_seed(0)
inputs = torch.randn(64, 8)


class Points(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return inputs[index], inputs[index, :1]


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x, y, mode="tensor"):
        output = self.net(x)
        return {"loss": nn.functional.mse_loss(output, y)} if mode == "loss" else output


Runner(
    model=Model(),
    work_dir="work",
    train_dataloader={
        "dataset": Points(),
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "batch_size": 8,
        "collate_fn": {"type": "default_collate"},
    },
    train_cfg={"by_epoch": True, "max_epochs": 5},
    optim_wrapper={"optimizer": {"type": "AdamW", "lr": 1e-2}},
    param_scheduler={"type": "CosineAnnealingLR", "T_max": 40, "by_epoch": False},
    default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 5, "by_epoch": False}},
    randomness={"seed": 0, "deterministic": True},
    resume=True,
).train()
"""
"""MMEngine calls torch.load without weights_only, which fails since torch 2.6; the script says so."""

BY_ITERATIONS = (
    ('"DefaultSampler"', '"InfiniteSampler"'),
    ('"by_epoch": True, "max_epochs": 5', '"by_epoch": False, "max_iters": 40'),
)

SEEDABLE = (
    (
        "from accelerate.utils import set_seed",
        "from accelerate.utils import DataLoaderConfiguration, set_seed",
    ),
    (
        "Accelerator(cpu=True)",
        "Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))",
    ),
)
WITH_GENERATOR = (
    (
        "    def training_step(",
        '    def on_save_checkpoint(self, checkpoint):\n        checkpoint["generator"] = torch.get_rng_state()\n\n'
        '    def on_load_checkpoint(self, checkpoint):\n        self.generator = checkpoint["generator"]\n\n'
        "    def on_train_batch_start(self, batch, index):\n"
        '        if hasattr(self, "generator"):\n'
        '            torch.set_rng_state(self.__dict__.pop("generator"))\n\n'
        "    def training_step(",
    ),
)

LIGHTNING_EXACT = change(LIGHTNING, *STATEFUL, *WITH_GENERATOR)
"""The Lightning script with the order of samples from torchdata, and its generator restored."""

ACCELERATE_SEEDABLE = change(ACCELERATE, *SEEDABLE)
"""The Accelerate script with a sampler that is seeded for each epoch."""

ACCELERATE_EXACT = change(
    ACCELERATE_SEEDABLE,
    ("update = 0\n", "update, generator = 0, None\n"),
    (
        '    update = json.load(open("state/update.json"))\n',
        '    update = json.load(open("state/update.json"))\n'
        "    generator = torch.get_rng_state()\n",
    ),
    (
        "    for x, y in batches:\n",
        "    for x, y in batches:\n"
        "        if generator is not None:\n"
        "            torch.set_rng_state(generator)\n"
        "            generator = None\n",
    ),
)
"""The same, with the generator that the new iterator has drawn from set back."""


def _plant(
    name: str, script: str, expected: str, *pairs: tuple[str, str], part: str = ""
) -> Script:
    """Return a script of a framework with a fault."""
    return Script(name, TORCHVISION + change(script, *pairs), expected.split(), part)


LOADED = 'accelerator.load_state("state")\n'
MEAN = (
    "    with torch.no_grad():\n"
    "        for mean, weight in zip(ema.parameters(), {model}.parameters()):\n"
    "            mean.lerp_(weight, 0.1)\n"
)
"""An average of weights, after each update."""

FAULTS = [
    _plant(
        "Lightning: a plain DataLoader",
        LIGHTNING_EXACT,
        "samples",
        (
            "from torchdata.stateful_dataloader import StatefulDataLoader",
            "from torch.utils.data import DataLoader as StatefulDataLoader",
        ),
    ),
    _plant(
        "Lightning: torch's generator is not restored",
        LIGHTNING_EXACT,
        "generator",
        ('torch.set_rng_state(self.__dict__.pop("generator"))', "pass"),
        part="torch",
    ),
    _plant(
        "Lightning: the state of the optimizer is dropped from the checkpoint",
        LIGHTNING_EXACT,
        "optimizer",
        (
            'checkpoint["generator"] = torch.get_rng_state()',
            'checkpoint["generator"] = torch.get_rng_state()\n'
            '        checkpoint["optimizer_states"][0]["state"] = {}',
        ),
    ),
    _plant(
        "Lightning: a schedule that the training step steps is not saved",
        LIGHTNING_EXACT,
        "schedule option",
        (
            'return [optimizer], [{"scheduler": schedule, "interval": "step"}]',
            "self.schedule = schedule\n        return optimizer\n\n"
            "    def on_train_batch_end(self, outputs, batch, index):\n        self.schedule.step()",
        ),
    ),
    _plant(
        "Lightning: a warm-up counter of the module is not saved",
        LIGHTNING_EXACT,
        "option",
        (
            'return [optimizer], [{"scheduler": schedule, "interval": "step"}]',
            "self.count = 0\n        return optimizer\n\n"
            "    def optimizer_step(self, epoch, index, optimizer, closure):\n"
            "        self.count += 1\n"
            '        optimizer.param_groups[0]["lr"] = 1e-2 * self.count / 36\n'
            "        optimizer.step(closure=closure)",
        ),
        part="learning rate",
    ),
    _plant(
        "Lightning: a teacher outside of the module's parameters is not saved",
        LIGHTNING_EXACT,
        "loss",
        (
            "return nn.functional.mse_loss(self.net(batch[0]), batch[1])",
            "if index == 0 and self.current_epoch % 2 == 0 or not hasattr(self, 'teacher'):\n"
            "            self.__dict__['teacher'] = copy.deepcopy(self.net).eval()\n"
            "        aim = batch[1] + 0.1 * self.teacher(batch[0]).detach()\n"
            "        return nn.functional.mse_loss(self.net(batch[0]), aim)",
        ),
        ("import os\n", "import copy, os\n"),
    ),
    _plant(
        "Lightning: accumulation is cut by a checkpoint",
        LIGHTNING_EXACT,
        "samples",
        (
            "    def training_step(",
            "    def on_train_batch_end(self, outputs, batch, index):\n"
            "        self.batches = getattr(self, 'batches', 0) + 1\n"
            "        if self.batches % 10 == 0:\n"
            "            self.trainer.save_checkpoint(last)\n\n    def training_step(",
        ),
        (
            'callbacks=[ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=5)]',
            "accumulate_grad_batches=4, enable_checkpointing=False",
        ),
        part="batches",
    ),
    _plant(
        "Hugging Face Trainer: ignore_data_skip",
        TRAINER,
        "samples",
        ("learning_rate=1e-2", "ignore_data_skip=True, learning_rate=1e-2"),
        part="starts its epoch again",
    ),
    _plant(
        "Hugging Face Trainer: the state of generators was lost",
        TRAINER,
        "generator",
        (
            "saved = ",
            "for folder, _, names in os.walk('checkpoints'):\n"
            "    for name in names:\n"
            "        if name.startswith('rng_state'):\n"
            "            os.remove(f'{folder}/{name}')\n"
            "saved = ",
        ),
        part="torch",
    ),
    _plant(
        "Hugging Face Trainer: the schedule is made again after the load",
        TRAINER,
        "schedule option",
        ("trainer = Trainer(", "trainer = Fresh("),
        (
            "arguments = ",
            "class Fresh(Trainer):\n"
            "    def _load_optimizer_and_scheduler(self, checkpoint):\n"
            "        state = self.lr_scheduler.state_dict()\n"
            "        super()._load_optimizer_and_scheduler(checkpoint)\n"
            "        self.lr_scheduler.load_state_dict(state)\n\n\narguments = ",
        ),
    ),
    _plant(
        "Hugging Face Trainer: the moments are set to zero at the start",
        TRAINER,
        "optimizer",
        ("set_seed\n", "TrainerCallback, set_seed\n"),
        (
            "arguments = ",
            "class Zero(TrainerCallback):\n"
            "    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):\n"
            "        for moments in optimizer.state.values():\n"
            '            moments["exp_avg"].zero_()\n\n\narguments = ',
        ),
        ("train_dataset=Points()", "train_dataset=Points(), callbacks=[Zero()]"),
        part="first moment",
    ),
    _plant(
        "Hugging Face Trainer: an average that a callback saves is not loaded",
        TRAINER,
        "checkpoint",
        ("set_seed\n", "TrainerCallback, set_seed\n"),
        (
            "arguments = ",
            "class Average(TrainerCallback):\n"
            "    def on_train_begin(self, args, state, control, model=None, **kwargs):\n"
            "        self.ema = copy.deepcopy(model)\n\n"
            "    def on_step_end(self, args, state, control, model=None, **kwargs):\n"
            "        ema = self.ema\n"
            + "".join(f"    {line}\n" for line in MEAN.format(model="model").splitlines())
            + "\n    def on_save(self, args, state, control, **kwargs):\n"
            '        torch.save({"ema": self.ema.state_dict()}, "checkpoints/ema.pt")\n\n\narguments = ',
        ),
        ("train_dataset=Points()", "train_dataset=Points(), callbacks=[Average()]"),
        ("import os\n", "import copy, os\n"),
        ("bool(os.listdir(", "any(name.startswith('checkpoint-') for name in os.listdir("),
        part="ema",
    ),
    _plant(
        "Accelerate: no skip_first_batches",
        ACCELERATE_EXACT,
        "samples",
        ("accelerator.skip_first_batches(loader, skip) if skip else loader", "loader"),
        part="starts its epoch again",
    ),
    _plant(
        "Accelerate: a sampler without set_epoch",
        ACCELERATE_EXACT,
        "samples",
        ("    loader.set_epoch(epoch)\n", ""),
    ),
    _plant(
        "Accelerate: the schedule is not prepared",
        ACCELERATE_EXACT,
        "schedule option",
        (
            "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)",
            "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        ),
    ),
    _plant(
        "Accelerate: the seed is set after the load",
        ACCELERATE_EXACT,
        "generator",
        (LOADED, f"{LOADED}    set_seed(0)\n"),
        part="torch",
    ),
    _plant(
        "Accelerate: a teacher is not registered for checkpointing",
        ACCELERATE_EXACT,
        "loss",
        ("update, generator = 0", "ema = copy.deepcopy(model)\nupdate, generator = 0"),
        ("import json, os", "import copy, json, os"),
        ("(model(x), y)", "(model(x), y + 0.1 * ema.eval()(x).detach())"),
        (
            "        schedule.step()\n",
            "        schedule.step()\n"
            + "".join(f"    {line}\n" for line in MEAN.format(model="model").splitlines()),
        ),
    ),
    _plant(
        "Accelerate: accumulation is cut by a checkpoint",
        ACCELERATE_EXACT,
        "samples",
        ("Accelerator(cpu=True,", "Accelerator(cpu=True, gradient_accumulation_steps=4,"),
        (
            "        optimizer.zero_grad()\n        loss = nn.functional.mse_loss(model(x), y)\n"
            "        accelerator.backward(loss)\n        optimizer.step()\n        schedule.step()\n",
            "        with accelerator.accumulate(model):\n"
            "            loss = nn.functional.mse_loss(model(x), y)\n"
            "            accelerator.backward(loss)\n            optimizer.step()\n"
            "            schedule.step()\n            optimizer.zero_grad()\n",
        ),
        ("while update < 36:", "while update < 96:"),
        ("if update == 36:", "if update == 96:"),
        ("update % 5 == 0", "update % 10 == 0"),
        part="batches",
    ),
]
"""Faults in scripts of frameworks that are exact without them."""

CLEAN = [
    Script("Lightning, its generator restored by the module", TORCHVISION + LIGHTNING_EXACT),
    Script("Hugging Face Trainer", TORCHVISION + TRAINER),
    Script(
        "Accelerate, a seedable sampler, the generator set back", TORCHVISION + ACCELERATE_EXACT
    ),
]
"""Scripts of frameworks that are exact."""

RELEASED = [
    Script("Lightning, a shuffled DataLoader", TORCHVISION + LIGHTNING),
    Script("Lightning, StatefulDataLoader", TORCHVISION + change(LIGHTNING, *STATEFUL)),
    Script("Hugging Face Trainer", TORCHVISION + TRAINER),
    Script("Accelerate, skip_first_batches", TORCHVISION + ACCELERATE),
    Script("Accelerate, use_seedable_sampler", TORCHVISION + ACCELERATE_SEEDABLE),
    Script("Ignite, Engine", IGNITE),
    Script("Ignite, DeterministicEngine", change(IGNITE, *DETERMINISTIC)),
    Script("MMEngine, by epochs", TORCHVISION + MMENGINE),
    Script("MMEngine, by iterations", TORCHVISION + change(MMENGINE, *BY_ITERATIONS)),
    Script("a loop with StatefulDataLoader", PLAIN_STATEFUL),
    Script("a loop with StreamingDataLoader of litData", TORCHVISION + LITDATA),
    Script("a loop as torchtitan's, distributed checkpoints", TITAN),
    Script("OLMo-core, its trainer", TORCHVISION + OLMO),
]
"""Scripts as the documentation of a framework has them; what the audit says is a measurement."""
