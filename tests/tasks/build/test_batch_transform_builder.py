from dataclasses import replace
from pathlib import Path

import mixing_parts  # noqa: F401 - registers `blended`
import pytest
import torch
from harness import train
from torch import nn

from phasetrain.distributed import Strategy, World
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.losses import LOSSES
from phasetrain.tasks import Position, Supervised
from phasetrain.tasks.build.batch_transform_builder import check_takes_soft

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "loss", [LOSSES.build("cross_entropy"), nn.CrossEntropyLoss(weight=torch.ones(5)), nn.MSELoss()]
)
def test_losses_of_probabilities_are_accepted(loss: nn.Module) -> None:
    check_takes_soft(loss, 5, CPU)  # raises for a misfit, as the next test shows


@pytest.mark.parametrize("loss", [nn.MultiMarginLoss(), nn.NLLLoss()])
def test_losses_of_classes_alone_are_rejected(loss: nn.Module) -> None:
    name = type(loss).__name__
    with pytest.raises(
        ConfigError,
        match=rf"^DATA\.TRAIN\.batch_transforms and LOSS: {name} ",
    ):
        check_takes_soft(loss, 5, CPU)


class Counting(nn.Module):
    """Takes only mappings, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output["scores"].sum() * target["class"].sum()  # type: ignore[call-overload,no-any-return]


def test_loss_of_mappings_is_accepted_without_a_counted_call() -> None:
    loss = Counting()
    check_takes_soft(loss, 5, CPU)
    assert loss.calls == 0


def test_run_is_rejected_before_training(tmp_path: Path) -> None:
    words = ("DATA.TRAIN.batch_transforms=[blended]", "LOSS.name=MultiMarginLoss")
    with pytest.raises(
        ConfigError,
        match=r"^DATA\.TRAIN\.batch_transforms and LOSS: MultiMarginLoss ",
    ):
        train(tmp_path, *words)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "DATA.TRAIN.batch_transforms=[blendid]",
            r"DATA.TRAIN.batch_transforms\[0\] = 'blendid' .*'blended'",
        ),
        (
            "DATA.TRAIN.batch_transforms=[{name: blended, laest: 1}]",
            r"batch_transforms\[0\]\.laest .*\.least\b",
        ),
        (
            "DATA.TRAIN.batch_transforms=[{name: blended, least: 0}]",
            r"batch_transforms\[0\] .*least = 0:",
        ),
        ("DATA.TEST.batch_transforms=[blended]", r"DATA\.TEST\.batch_transforms"),
    ],
)
def test_bad_batch_transforms_are_rejected(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, words)


class Parted(Hook):
    """Keeps what one micro-batch becomes at several positions, and on several processes."""

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        parts, at = run.task.parts, Position("train", 3, 3, 0.0)
        others = [
            Supervised(replace(parts, strategy=Strategy(World(rank, 3)))) for rank in range(3)
        ]
        found = [
            run.task.transform_batch(batch, at),
            run.task.transform_batch(batch, at),
            run.task.transform_batch(batch, at, 1),
            run.task.transform_batch(batch, at._replace(updates=4)),
            *(other.transform_batch(batch, at) for other in others),
        ]
        self.targets = [one.target for one in found]


def test_draws_depend_on_update_micro_batch_and_rank(tmp_path: Path) -> None:
    hook = Parted()
    words = (
        "DATA.TRAIN.batch_transforms=[blended]",
        "PHASES.updates=1",
        "PHASES.epochs=null",
    )
    train(tmp_path, *words, "DATA.TEST=null", hooks={"parted": hook})
    first, again, micro, later, *processes = hook.targets
    assert torch.equal(first, again)
    assert torch.equal(first, processes[0])
    different = [first, micro, later, *processes[1:]]
    assert len({tuple(target.flatten().tolist()) for target in different}) == 5
