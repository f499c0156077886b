"""Workers have the values that hooks give to a dataset, and a `set_epoch` that nothing calls is
reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import phasetrain
from phasetrain.app.result import RunResult
from phasetrain.hooks import Hook, on
from phasetrain.models import MODELS
from phasetrain.testing import assert_exact_resume


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Compares each row with a partner."""

    def __init__(self) -> None:
        self.inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        self.cache: dict[int, torch.Tensor] = {}
        self.redraw(0)

    def redraw(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(epoch)
        self.partner = torch.randperm(16, generator=generator).tolist()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.cache.setdefault(index, 2 * self.inputs[index])
        other = self.inputs[self.partner[index]]
        return torch.cat([row, other]), (row - other).norm()[None]


class Epochs(Pairs):
    """Has a method that torch's samplers have."""

    def set_epoch(self, epoch: int) -> None:
        self.redraw(epoch)


def train(folder: Path, data: Any, workers: int, hooks: dict[str, Any], **run: Any) -> RunResult:
    torch.manual_seed(0)
    return phasetrain.fit(
        nn.Linear(8, 1),
        train=data,
        loss=nn.MSELoss(),
        epochs=3,
        batch_size=4,
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        DATA={"TRAIN": {"workers": workers}},
        hooks=hooks,
        RUN={"dir": str(folder), **run},
    )


def at_start(pairs: Pairs, subset: Any) -> Any:
    @on("phase_start")
    def act(run: Any, phase: Any) -> None:
        pairs.redraw(phase.epoch)

    return act


def by_task(pairs: Pairs, subset: Any) -> Any:
    @on("phase_start")
    def act(run: Any, phase: Any) -> None:
        assert run.task.parts.dataset_of("train") is subset
        run.task.parts.dataset_of("train").dataset.redraw(phase.epoch)

    return act


def at_end(pairs: Pairs, subset: Any) -> Any:
    @on("phase_end")
    def act(run: Any, phase: Any, metrics: Any) -> None:
        pairs.redraw(phase.epoch + 1)

    return act


def in_subset(pairs: Pairs, subset: Any) -> Any:
    @on("phase_start")
    def act(run: Any, phase: Any) -> None:
        subset.indices = list(range(phase.epoch, phase.epoch + 8))

    return act


def in_step(pairs: Pairs, subset: Any) -> Any:
    @on("step")
    def act(run: Any, phase: Any, out: Any) -> None:
        pairs.redraw(run.state.updates)

    return act


def read_only(pairs: Pairs, subset: Any) -> Any:
    @on("phase_end")
    def act(run: Any, phase: Any, metrics: Any) -> None:
        pairs[phase.epoch]

    return act


@pytest.mark.feature(
    "data.hook_changes",
    "workers have the values that hooks give to a dataset",
    "`on_phase_start`",
)
@pytest.mark.parametrize(
    ("make", "restarts", "warnings"),
    [
        (at_start, 2, 0),
        (by_task, 2, 0),
        (at_end, 2, 0),
        (in_subset, 2, 0),
        (in_step, 2, 1),
        (read_only, 0, 0),
    ],
)
def test_workers_have_the_changes_of_a_hook(
    make: Callable[[Pairs, Any], Any],
    restarts: int,
    warnings: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    digests = []
    for workers in (0, 2):
        pairs = Pairs()
        subset = Subset(pairs, list(range(8)))
        hook = make(pairs, subset)
        folder = tmp_path / str(workers)
        digests.append(train(folder, subset, workers, {"mine": hook}, exact=False).digest)
        log = (folder / "log.txt").read_text()
        assert log.count("so its workers start again") == (restarts if workers else 0)
        # The terminal has the first restart only.
        printed = capsys.readouterr()
        shown = (printed.out + printed.err).count("so its workers start again")
        assert shown == min(restarts if workers else 0, 1)
        assert log.count("in the middle of an epoch") == (warnings if workers else 0)
    assert (digests[0] == digests[1]) == (not warnings)


class Redrawn(Pairs):
    """Has partners that a hook draws again."""

    recomputed = ("partner", "cache")


@MODELS.register("pair_distance")
def make_model() -> nn.Module:
    return nn.Linear(8, 1)


class RedrawAtStart(Hook):
    """Draws the partners of an epoch before it."""

    def on_phase_start(self, run: Any, phase: Any) -> None:
        if phase.is_train:
            run.task.parts.loaders["train"].reader.dataset.redraw(phase.epoch)


class RedrawAtEnd(Hook):
    """Draws the partners of the next epoch after one, and again after a resume."""

    def __init__(self) -> None:
        self.epoch = 0

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        if phase.is_train:
            self.epoch = phase.epoch + 1
            self.redraw(run)

    def on_load(self, run: Any) -> None:
        self.redraw(run)

    def redraw(self, run: Any) -> None:
        run.task.parts.loaders["train"].reader.dataset.redraw(self.epoch)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.parametrize("hook", [RedrawAtStart, RedrawAtEnd])
def test_resume_with_workers_and_a_changed_dataset_is_exact(hook: type[Hook]) -> None:
    words = [
        f"DATA.TRAIN.dataset={__name__}.Redrawn",
        "DATA.TRAIN={batch_size: 4, transforms: []}",
        "DATA.TEST=null",
        "MODEL={name: pair_distance}",
        "LOSS={name: MSELoss}",
        "METERS=null",
        f"HOOKS.mine.name={__name__}.{hook.__name__}",
    ]
    assert_exact_resume(words, workers=(2, 0, 2))


@pytest.mark.parametrize(
    ("kind", "is_called", "warnings"),
    [
        (Epochs, False, 1),
        (Epochs, True, 0),
        (Pairs, False, 0),
    ],
)
def test_set_epoch_that_nothing_calls_is_reported(
    kind: type[Pairs], is_called: bool, warnings: int, tmp_path: Path
) -> None:
    pairs = kind()

    @on("phase_start")
    def act(run: Any, phase: Any) -> None:
        pairs.set_epoch(phase.epoch)  # type: ignore[attr-defined]

    train(tmp_path, pairs, 0, {"mine": act} if is_called else {})
    assert (tmp_path / "log.txt").read_text().count("set_epoch of Epochs") == warnings
