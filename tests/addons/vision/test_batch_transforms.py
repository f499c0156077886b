"""Runs with mixup and cutmix: they resume exactly, also on several ranks, and only the loss gets
mixed targets."""

from pathlib import Path

import pytest
import torch
from harness import SMALL, differences, differences_of_runs, newest, train
from mixing_parts import Noting
from processes import Launcher
from torch import Tensor

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.testing import assert_exact_resume

ONE = "MACHINE.threads=1"
BOTH = "[{name: one_of, transforms: [{name: mixup, alpha: 0.4}, {name: cutmix, per: sample}]}]"
MIXED = f"DATA.TRAIN.batch_transforms={BOTH}"


@pytest.mark.feature(
    "68",
    "mixup, cutmix (also of the views of self-supervised learning) and multi-crop, seeded by "
    "position",
    "`DATA.TRAIN.batch_transforms`, `multi_crop`",
)
def test_mixed_batches_resume_exactly() -> None:
    assert_exact_resume([*SMALL, MIXED, "OPTIMIZER.accumulate=2"], steps=[2], workers=None)


@pytest.mark.slow
def test_a_resume_is_exact_after_every_kind_of_kill() -> None:
    assert_exact_resume([*SMALL, MIXED, "OPTIMIZER.accumulate=2"])


@pytest.mark.slow
def test_transform_with_its_own_generator_is_detected() -> None:
    words = [*SMALL, "RUN.imports=[mixing_parts]", "DATA.TRAIN.batch_transforms=[unkeyed]"]
    with pytest.raises(AssertionError, match=r"another loss"):
        assert_exact_resume(words, workers=None)


class Watch(Hook):
    """Records the targets and batches that hooks get."""

    def __init__(self) -> None:
        self.targets: list[tuple[bool, Tensor]] = []
        self.given: list[Batch] = []

    def on_start(self, run: Run) -> None:
        Noting.seen.clear()  # calls of the builder, before the run

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        self.given.append(batch)

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        self.targets.append((phase.is_train, out.target))


def run_and_record(
    folder: Path, *words: str
) -> tuple[Watch, list[tuple[bool, Tensor]], dict[str, float]]:
    """Return the records of the hook and of the loss, and the metrics."""
    watch = Watch()
    result = train(
        folder,
        "LOSS.name=noting",
        "PHASES.epochs=1",
        "PHASES.limit.train=2",
        "METERS={accuracy: {}}",
        *words,
        hooks={"watch": watch},
    )
    assert result.last is not None
    return watch, list(Noting.seen), dict(result.last)


def test_the_loss_gets_mixed_targets_in_training_and_meters_those_of_the_data(
    tmp_path: Path,
) -> None:
    watch, targets, metrics = run_and_record(
        tmp_path, "DATA.TRAIN.batch_transforms=[{name: mixup, alpha: 1}]"
    )
    trained = [target for is_train, target in targets if is_train]
    assert [tuple(target.shape) for target in trained] == [(24, 10)] * 2
    assert all(torch.allclose(target.sum(1), torch.ones(24)) for target in trained)
    assert all((target.max(1).values < 1).sum() > 12 for target in trained)
    assert all(target.dtype == torch.int64 for is_train, target in targets if not is_train)
    assert all(target.dtype == torch.int64 for _, target in watch.targets)
    assert all(batch.target.dtype == torch.int64 for batch in watch.given)
    assert 0 <= metrics["train/accuracy"] <= 1
    for own, target in zip(watch.targets, trained, strict=False):
        assert (target.gather(1, own[1][:, None]) > 0).all()  # the sample itself takes part


def test_each_micro_batch_is_mixed_separately(tmp_path: Path) -> None:
    words = ("DATA.TRAIN.batch_transforms=[{name: mixup, alpha: 1}]", "OPTIMIZER.accumulate=3")
    watch, targets, _ = run_and_record(tmp_path, *words)
    trained = [target for is_train, target in targets if is_train]
    assert [len(target) for target in trained] == [8] * 6
    for (_, own), target in zip(watch.targets, trained, strict=False):
        others = [number for number in range(10) if number not in own.tolist()]
        assert not target[:, others].any()
    assert len({float(target.max(1).values.min()) for target in trained}) == 6


def test_empty_list_of_transforms_changes_nothing(tmp_path: Path) -> None:
    _, targets, _ = run_and_record(tmp_path)
    assert all(target.dtype == torch.int64 for _, target in targets)
    plain = train(tmp_path / "plain", "PHASES.epochs=1")
    empty = train(tmp_path / "empty", "PHASES.epochs=1", "DATA.TRAIN.batch_transforms=[]")
    assert plain.digest == empty.digest


def test_stage_may_have_its_own_schedules(tmp_path: Path) -> None:
    stages = "PHASES.stages=[{epochs: 1}, {epochs: 1, DATA: {TRAIN: {batch_transforms: [mixup]}}}]"
    _, targets, _ = run_and_record(tmp_path, "PHASES.epochs=null", stages)
    assert [target.ndim for is_train, target in targets if is_train] == [1, 1, 2, 2]


class TestSeveralProcesses:
    @pytest.mark.slow
    def test_three_ranks_resume_exactly_after_one_is_killed(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        words = (*SMALL, ONE, MIXED, "RUN.imports=[process_parts]", "CHECKPOINT.every_updates=2")
        unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
        assert launcher.run(unbroken, 3, *words).codes == [0, 0, 0]
        strike = "HOOKS.strike={rank: 1, update: 8}"
        assert launcher.run(folder, 3, *words, strike).codes[1] == -9
        assert launcher.run(folder, 3, *words, strike).codes == [0, 0, 0]
        assert differences_of_runs(unbroken, folder) == []

    @pytest.mark.slow
    def test_ordered_reduction_gives_equal_bits_on_any_number(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        words = (
            *SMALL,
            ONE,
            MIXED,
            "DISTRIBUTED.reduction=ordered",
            "DISTRIBUTED.virtual_shards=4",
            "PHASES.epochs=1",
        )
        for size in (1, 4):
            assert launcher.run(tmp_path / f"on{size}", size, *words).codes == [0] * size
        one, four = (newest(tmp_path / f"on{size}").state["task"]["model"] for size in (1, 4))
        assert differences(one, four, "model") == []
