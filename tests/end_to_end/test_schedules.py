"""Schedules over whole runs: skipped updates do not move them, too long ones are refused before
training."""

from pathlib import Path

import pytest
from harness import (
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from raising import raises

from phasetrain.errors import ConfigError

COMPOSITE = (
    "OPTIMIZER.SCHEDULES.lr={name: composite, parts: [{name: linear, start: 0, end: 1, length: 1 epochs}, "
    "{name: constant, length: 4 updates}, {name: cosine}]}"
)
MOMENTUM = "OPTIMIZER.SCHEDULES.momentum={name: one_cycle, rise: 0.5, start: 1, peak: 0.9, end: 1}"

SHORT_LAST = (
    "DATA.TRAIN.subset.samples=80",
    "DATA.TRAIN.drop_last=false",
    "PHASES.limit.train=null",
)
"""Epochs of 4 updates, the last one with 8 instead of 24 samples."""


def lrs(folder: Path) -> list[float]:
    return [record["lr"] for record in records(folder) if record["kind"] == "step"]


@pytest.mark.feature("49-51", "schedules depend on attempted updates", "`OPTIMIZER.SCHEDULES`")
def test_updates_that_a_scaler_skips_leave_schedules_and_counts_as_planned(tmp_path: Path) -> None:
    """Schedules go by attempted updates: they end where they were planned to, whatever the scaler
    has skipped."""
    scaler = "OPTIMIZER.scaler={name: grad, init_scale: 1e9, growth_interval: 2}"
    half = train(tmp_path / "half", "MACHINE.precision=fp16", scaler, COMPOSITE)
    whole = train(tmp_path / "whole", COMPOSITE)
    skipped = newest(tmp_path / "half").state["task"]["updater"]["skipped"]
    assert 0 < skipped < 15
    assert half.updates == whole.updates == 15
    assert lrs(tmp_path / "half") == lrs(tmp_path / "whole")
    top = max(lrs(tmp_path / "whole"))
    expected = [0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 11 / 12, 0.75, 0.5, 0.25, 1 / 12]
    cosine = {10: 0.9330127, 11: 0.75, 12: 0.5, 13: 0.25, 14: 0.0669873}
    shares = [cosine.get(update, share) for update, share in enumerate(expected)]
    assert lrs(tmp_path / "whole") == pytest.approx([top * share for share in shares], rel=1e-6)


def test_composite_and_momentum_schedules_resume_exactly(tmp_path: Path) -> None:
    words = (COMPOSITE, MOMENTUM, "PHASES.epochs=2")
    train(tmp_path / "whole", *words)
    run_until_killed(tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(6)})
    train(tmp_path / "run", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


@pytest.mark.feature("52")
@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (
            "{name: composite, parts: [{name: constant, length: 2 epochs}, {name: cosine, length: 6 updates}]}",
            r"SCHEDULES.lr \(schedule 'composite'\): parts: 2 epochs \+ 6 updates take 16 updates, more than the run, "
            r"which has 15 updates \(3 epochs\)",
        ),
        pytest.param(
            "{name: wsd, warmup: 2 epochs, decay: 6 updates}",
            r"SCHEDULES.lr \(schedule 'wsd'\): warmup = '2 epochs' and decay = '6 updates' together take 16 updates",
            marks=pytest.mark.addon("optimizers"),
        ),
        (
            "{name: cosine, warmup: 3 epochs}",
            r"warmup = '3 epochs' is not shorter than the run, which has 15 updates",
        ),
        (
            "{name: composite, parts: [{name: cosin}]}",
            r"SCHEDULES.lr.parts\[0\].name = 'cosin' .* did you mean 'cosine'",
        ),
    ],
)
def test_schedule_longer_than_the_run_is_rejected_before_training(
    tmp_path: Path, schedule: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, f"OPTIMIZER.SCHEDULES.lr={schedule}")
    assert not (tmp_path / "checkpoints").exists()


HELD = (
    "OPTIMIZER.SCHEDULES.lr={name: cosine, warmup: 0, every: epoch}",
    "OPTIMIZER.SCHEDULES.momentum={name: linear, end: 0.5, every: epoch}",
    # Phases that begin within an epoch.
    "PHASES.test_every.updates=3",
)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held")
    train(folder, *HELD)
    return folder


class TestHeld:
    """Schedules with `every: epoch`."""

    @pytest.mark.feature(
        "optimizer.held_schedules",
        "schedules held within an epoch",
        "`OPTIMIZER.SCHEDULES.x.every: epoch`",
    )
    def test_value_changes_at_the_start_of_an_epoch_only(self, held: Path) -> None:
        factors = [rate / 0.1 for rate in lrs(held)]
        assert factors == pytest.approx([1] * 5 + [0.75] * 5 + [0.25] * 5)

    @pytest.mark.feature("optimizer.held_schedules")
    def test_run_killed_within_an_epoch_resumes_exactly(self, held: Path, tmp_path: Path) -> None:
        run_until_killed(tmp_path, *HELD, hooks={"save": SaveEachStep(), "kill": KillAfter(12)})
        train(tmp_path, *HELD)
        assert differences_of_runs(held, tmp_path) == []

    @pytest.mark.addon("optimizers")
    def test_every_of_step_is_a_duration(self, tmp_path: Path) -> None:
        step = "OPTIMIZER.SCHEDULES.lr={name: step, warmup: 0, factor: 0.5, every: 1 epochs}"
        train(tmp_path, step, "PHASES.epochs=2")
        assert [rate / 0.1 for rate in lrs(tmp_path)] == pytest.approx([1] * 5 + [0.5] * 5)

    @pytest.mark.feature("7")
    @pytest.mark.parametrize(
        ("schedule", "factors"),
        [
            ("{name: multistep, milestones: [2 epochs], warmup: 0}", [1] * 8 + [0.1] * 4),
            pytest.param(
                "{name: step, factor: 0.5, every: 1 epoch, warmup: 0}",
                [1] * 4 + [0.5] * 4 + [0.25] * 4,
                marks=pytest.mark.addon("optimizers"),
            ),
            ("{name: constant, warmup: 2 epochs}", [n / 8 for n in range(8)] + [1] * 4),
            pytest.param(
                "{name: cosine_restarts, period: 2 epochs, decay: 0.5}",
                [
                    *(1, 0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602),
                    *(0.5, 0.4809699, 0.4267767, 0.3456709),
                ],
                marks=pytest.mark.addon("optimizers"),
            ),
            (
                "{name: composite, parts: [{name: constant, length: 2 epochs}, {name: linear}]}",
                [1] * 8 + [1, 0.75, 0.5, 0.25],
            ),
            pytest.param(
                "{name: torch.StepLR, step_size: 2 epochs}",
                [1] * 8 + [0.1] * 4,
                marks=pytest.mark.addon("libraries"),
            ),
            pytest.param(
                "{name: torch.StepLR, step_size: 2, every: epoch}",
                [1] * 8 + [0.1] * 4,
                marks=pytest.mark.addon("libraries"),
            ),
        ],
    )
    def test_epoch_with_a_short_last_batch_has_a_whole_number_of_updates(
        self, tmp_path: Path, schedule: str, factors: list[float]
    ) -> None:
        train(tmp_path, *SHORT_LAST, "PHASES.epochs=3", f"OPTIMIZER.SCHEDULES.lr={schedule}")
        assert [rate / 0.1 for rate in lrs(tmp_path)] == pytest.approx(factors)

    def test_other_values_are_rejected(self, tmp_path: Path) -> None:
        with raises(ConfigError, key="OPTIMIZER.SCHEDULES.lr.every", code="config.wrong_type"):
            train(tmp_path, "OPTIMIZER.SCHEDULES.lr={name: cosine, every: 2 epochs}")
