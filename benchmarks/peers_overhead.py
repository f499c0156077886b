"""Microseconds per iteration that phasetrain and other frameworks add to a hand-written loop.

    python benchmarks/peers_overhead.py [--repetitions 15] [--updates 1000] [--only NAME ...]

Model, optimizer and data are those in `overhead.py`. The other frameworks get their batches as
slices of tensors in memory, as fast as their loaders can, without logger, progress bar and
checkpoints, and are timed between their own start and end events, so start-up does not count. All
variants take turns, before which calls of Python functions per iteration are counted. Needs the packages in requirements-peers.txt; those that are not installed are
left out.

Lightning, the Hugging Face Trainer, Ignite (its Engine with a process function as in its
documentation, over an iterable that slices tensors, and over a DataLoader) and Accelerate (a hand-written loop with `prepare` and `backward`) are compared.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from statistics import median, quantiles

import torch
from overhead import (
    BATCH,
    FEATURES,
    GUARDED,
    PLAIN,
    STEPS_PER_EPOCH,
    bare,
    count_calls,
    framework,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SAMPLES = BATCH * STEPS_PER_EPOCH


class Slices(Dataset):
    """Tensors in memory that return whole batches for lists of indices."""

    def __init__(self) -> None:
        self.inputs, self.targets = (
            torch.randn(SAMPLES, FEATURES),
            torch.randint(FEATURES, (SAMPLES,)),
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, chosen: list[int]) -> dict[str, Tensor]:
        return {"inputs": self.inputs[chosen], "labels": self.targets[chosen]}

    __getitems__ = __getitem__


class Epochs:
    """The same batches without a DataLoader, for frameworks that take any iterable."""

    def __init__(self) -> None:
        self.data = Slices()

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.data[chosen] for chosen in torch.randperm(SAMPLES).split(BATCH))


def loader() -> DataLoader:
    data = Slices()
    return DataLoader(
        data, sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=True), batch_size=None
    )


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(FEATURES, FEATURES)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def time_lightning(updates: int) -> float:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.optimizer = make_parts()

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return cross_entropy(self.layer(batch["inputs"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    class Watch(lightning.Callback):
        def on_train_start(self, *given: object) -> None:
            self.began = time.process_time()

        def on_train_end(self, *given: object) -> None:
            self.seconds = time.process_time() - self.began

    watch = Watch()
    trainer = lightning.Trainer(
        max_steps=updates, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[watch], log_every_n_steps=10**9,
    )  # fmt: skip
    trainer.fit(Model(), loader())
    return watch.seconds


def time_transformers(updates: int) -> float:
    import transformers

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.optimizer = make_parts()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            scores = self.layer(inputs)
            return {"loss": cross_entropy(scores, labels), "logits": scores}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return loader()

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *given: object, **more: object) -> None:
            self.began = time.process_time()

        def on_train_end(self, *given: object, **more: object) -> None:
            self.seconds = time.process_time() - self.began

    clock, model = Clock(), Scored()
    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(
            folder, max_steps=updates, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, max_grad_norm=0.0,
        )  # fmt: skip
        Trainer(
            model,
            given,
            train_dataset=Slices(),
            optimizers=(model.optimizer, None),
            callbacks=[clock],
        ).train()
    return clock.seconds


def time_ignite(updates: int, batches: Iterable[dict[str, Tensor]] | None = None) -> float:
    from ignite.engine import Engine

    model, optimizer = make_parts()

    def step(engine: Engine, batch: dict[str, Tensor]) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = cross_entropy(model(batch["inputs"]), batch["labels"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    given = batches or Epochs()
    began = time.process_time()
    trainer.run(given, max_epochs=updates // STEPS_PER_EPOCH)
    return time.process_time() - began


def time_ignite_loader(updates: int) -> float:
    return time_ignite(updates, loader())


def time_accelerate(updates: int) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    data = Slices()
    # Accelerate takes no loader without a batch size.
    batches = DataLoader(
        data,
        batch_sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=True),
        collate_fn=lambda batch: batch,
    )
    model, optimizer, batches = accelerator.prepare(*make_parts(), batches)
    model.train()
    began = time.process_time()
    for _ in range(updates // STEPS_PER_EPOCH):
        for batch in batches:
            loss = cross_entropy(model(batch["inputs"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return time.process_time() - began


PEERS: dict[str, Callable[[int], float]] = {
    "lightning": time_lightning,
    "transformers": time_transformers,
    "ignite": time_ignite,
    "ignite with DataLoader": time_ignite_loader,
    "accelerate": time_accelerate,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    own = {
        "phasetrain, everything optional off": PLAIN,
        "phasetrain with the numerics guard": GUARDED,
    }
    trials: dict[str, Callable[[], float]] = {}
    for name, trial in {"bare loop": bare(given.updates)}.items():
        trials[name] = lambda trial=trial: trial().cpu
    for name, words in own.items():
        made = framework(words, given.updates)
        trials[name] = lambda made=made: made().cpu
    for name in given.only:
        package, _, loads = name.partition(" ")
        if find_spec(package) is None:
            print(f"{package} is not installed")
            continue
        version = import_module(package).__version__
        trials[f"{package} {version} {loads}"] = lambda timed=PEERS[name]: timed(given.updates)
    calls = {name: count_calls(trial) / given.updates for name, trial in trials.items()}
    found: dict[str, list[float]] = {name: [] for name in trials}
    for repetition in range(given.repetitions + 1):
        for name, trial in trials.items():
            seconds = trial()
            if repetition:  # the first one warms up
                found[name].append(1e6 * seconds / given.updates)
    base = found["bare loop"]
    for name, times in found.items():
        above = median(one - other for one, other in zip(times, base, strict=True))
        low, ratio, high = quantiles(
            [one / other for one, other in zip(times, base, strict=True)], n=4
        )
        print(
            f"{name:45} {median(times):8.1f} us  {above:8.1f} above bare  ratio {ratio:.2f} "
            f"({low:.2f} .. {high:.2f})  {calls[name]:.1f} calls"
        )


if __name__ == "__main__":
    main()
