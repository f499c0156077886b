"""Microseconds per iteration that phasetrain, Lightning and the Hugging Face Trainer add to a loop.

    python benchmarks/peers_overhead.py [--repetitions 15] [--updates 1000]

Model, optimizer and data are those in `overhead.py`. The other frameworks get their batches as
slices of tensors in memory, as fast as their loaders can, without logger, progress bar and
checkpoints, and are timed between their own start and end events, so start-up does not count. All
variants take turns. Needs the packages in requirements-peers.txt.
"""

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median

import lightning
import torch
import transformers
from overhead import BATCH, FEATURES, GUARDED, PLAIN, STEPS_PER_EPOCH, bare, framework
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


def loader() -> DataLoader:
    data = Slices()
    return DataLoader(
        data, sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=True), batch_size=None
    )


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return cross_entropy(self.layer(batch["inputs"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=True)


class Watch(lightning.Callback):
    def on_train_start(self, *given: object) -> None:
        self.began = time.process_time()

    def on_train_end(self, *given: object) -> None:
        self.seconds = time.process_time() - self.began


def of_lightning(updates: int) -> float:
    watch = Watch()
    trainer = lightning.Trainer(
        max_steps=updates, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[watch], log_every_n_steps=10**9,
    )  # fmt: skip
    trainer.fit(Model(), loader())
    return watch.seconds


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

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


def of_transformers(updates: int) -> float:
    clock, model = Clock(), Scored()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(
            folder, max_steps=updates, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, max_grad_norm=0.0,
        )  # fmt: skip
        Trainer(
            model, given, train_dataset=Slices(), optimizers=(optimizer, None), callbacks=[clock]
        ).train()
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--updates", type=int, default=1000)
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
    trials[f"Lightning {lightning.__version__}"] = lambda: of_lightning(given.updates)
    trials[f"Hugging Face Trainer {transformers.__version__}"] = lambda: of_transformers(
        given.updates
    )
    found: dict[str, list[float]] = {name: [] for name in trials}
    for repetition in range(given.repetitions + 1):
        for name, trial in trials.items():
            seconds = trial()
            if repetition:  # the first one warms up
                found[name].append(1e6 * seconds / given.updates)
    base = found["bare loop"]
    for name, times in found.items():
        above = median(one - other for one, other in zip(times, base, strict=True))
        print(
            f"{name:45} {median(times):8.1f} us  {above:8.1f} above bare  "
            f"{median(times) / median(base):6.2f}"
        )


if __name__ == "__main__":
    main()
