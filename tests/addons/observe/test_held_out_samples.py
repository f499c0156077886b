"""Hooks that read samples which a subset holds out are reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import phasetrain
from phasetrain.addons.observe.held_out_samples import warn_of_held_out_samples
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run, on
from phasetrain.tasks import Supervised
from phasetrain.testing.build import resolve_overrides

WORDS = [
    "experiment=null",
    "MODEL={name: torch.nn.Linear, in_features: 1, out_features: 1}",
    "LOSS.name=MSELoss",
    "METERS.loss={}",
    "PHASES.epochs=1",
    f"DATA.TRAIN={{dataset: {__name__}.Numbers, batch_size: 2}}",
    f"DATA.VALID.dataset={__name__}.Numbers",
]
PART = "DATA.VALID.subset={skip: 4}"


class Numbers(Dataset[Any]):
    """The numbers from 0 to 7; the target is the number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([float(index)])


def read_numbers(samples: Any) -> list[float]:
    return [float(samples[number][0]) for number in range(len(samples))]


class Whole(Hook):
    """Reads the whole dataset."""

    observe_only = True

    def on_start(self, run: Run) -> None:
        self.seen = read_numbers(run.task.parts.dataset_of("valid"))


class OfPhase(Whole):
    """Reads the whole dataset of a phase."""

    def on_start(self, run: Run) -> None:
        """Do nothing."""

    def on_phase_end(self, run: Run, phase: Phase, metrics: Any) -> None:
        self.seen = read_numbers(run.task.parts.dataset_of(phase.data))


class OfTrain(Hook):
    """Reads the dataset of another split."""

    def on_start(self, run: Run) -> None:
        self.seen = read_numbers(run.task.parts.dataset_of("train"))


class Chosen(Whole):
    """Selects the samples in use itself."""

    def on_start(self, run: Run) -> None:
        chosen = run.task.parts.samples_of("valid").chosen
        assert chosen is not None
        data = run.task.parts.dataset_of("valid")
        self.seen = [float(data[int(number)][0]) for number in chosen]


class InUse(Whole):
    """Reads the samples in use."""

    def on_start(self, run: Run) -> None:
        self.seen = read_numbers(run.task.parts.samples_of("valid"))


@on("start")
def read_all(run: Run) -> None:
    """Read the whole dataset."""
    read_numbers(run.task.parts.dataset_of("valid"))


@pytest.mark.feature(
    "hooks.samples_of",
    "hooks get the samples in use; code that reads those that a subset holds out is reported",
    "`parts.samples_of(split)`",
)
@pytest.mark.parametrize(
    ("hook", "words", "lines"),
    [
        (Whole(), [PART], 1),
        (read_all, [PART], 1),
        (OfPhase(), [PART], 1),
        (Whole(), [], 0),
        (Whole(), ["DATA.TRAIN.subset.samples=4"], 0),  # of another split
        (OfTrain(), [PART], 0),
        (OfTrain(), ["DATA.TRAIN.subset.samples=4"], 1),
        (Chosen(), [PART], 0),
        (InUse(), [PART], 0),
    ],
)
def test_hook_that_reads_held_out_samples_is_reported(
    hook: Hook, words: list[str], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    builder = resolve_overrides([*WORDS, *words]).builder()
    data = builder.data()
    task = Supervised(builder.parts(data, builder.plan(data)))
    warn_of_held_out_samples(task, {"mean": hook})
    assert len(caplog.messages) == lines
    split = "TRAIN" if isinstance(hook, OfTrain) else "VALID"
    assert all("HOOKS.mean" in line for line in caplog.messages)
    assert all(f"DATA.{split}.subset" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("hook", "seen", "warnings"),
    [
        (Whole(), [0, 1, 2, 3, 4, 5, 6, 7], 1),
        (InUse(), [1, 5, 6, 7], 0),
        (Chosen(), [1, 5, 6, 7], 0),
    ],
)
def test_run_says_so_before_its_first_step(
    tmp_path: Path, hook: Whole, seen: list[int], warnings: int
) -> None:
    words = [*WORDS, PART, "OPTIMIZER={name: sgd, lr: 0.1}", f"RUN.dir={tmp_path}"]
    phasetrain.run(words, hooks={"mean": hook})
    assert hook.seen == seen
    assert (tmp_path / "log.txt").read_text().count("uses dataset_of") == warnings
