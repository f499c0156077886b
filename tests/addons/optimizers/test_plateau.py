"""The learning rate goes down where a metric stands still, at the same place after any kill and on
all processes."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
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

from phasetrain.addons.optimizers.plateau import Plateau
from phasetrain.distributed import World
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError
from phasetrain.optim import SCHEDULES, Updater

TEST = Phase(1, "test", 0, 0, 2, 0, 8, 4)
NEVER_BETTER = "HOOKS.plateau={monitor: -test/loss, patience: 1, min_delta: 100.0, factor: 0.5}"
COSINE = "OPTIMIZER.SCHEDULES.lr={name: cosine, warmup: 0}"


class Trained:
    """As much of a run as the hook talks to."""

    def __init__(self) -> None:
        self.world, self.task = World(), self
        self.updater = Updater(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))


def factors(hook: Plateau, *values: float) -> list[float]:
    run: Any = Trained()
    found = []
    for value in values:
        hook.on_phase_end(run, TEST, {"loss": value})
        found.append(run.updater.factor)
    return found


def test_patience_is_spent_by_measurements_that_bring_nothing() -> None:
    hook = Plateau("-test/loss", factor=0.5, patience=2)
    assert factors(hook, 3.0, 2.0, 2.0, 1.9, 1.9, 5.0, 1.9, 1.9) == [1, 1, 1, 1, 1, 0.5, 0.5, 0.25]


def test_cooldown_follows_a_reduction() -> None:
    hook = Plateau("-test/loss", factor=0.5, patience=1, cooldown=2)
    assert factors(hook, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) == [1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert hook.state_dict() == {"best": -1.0, "spent": 0, "resting": 1}


def test_it_goes_no_lower_than_it_may() -> None:
    assert factors(Plateau("-test/loss", patience=1, min_factor=0.05), 1.0, 1.0, 1.0, 1.0) == [
        1,
        0.1,
        0.05,
        0.05,
    ]


def test_other_splits_and_what_is_no_number() -> None:
    hook, run = Plateau("test/accuracy", patience=1), Trained()
    hook.on_phase_end(run, Phase(0, "other", 0, 0, 2, 0, 8, 4), {"loss": 1.0})  # type: ignore[arg-type]
    assert hook.patience.spent == 0
    hook.on_phase_end(run, TEST, {"accuracy": float("nan")})  # type: ignore[arg-type]
    assert run.updater.factor == 0.1


@pytest.mark.parametrize(("sign", "mode"), [("-", "min"), ("", "max")])
def test_factors_equal_those_of_torch(sign: str, mode: Any) -> None:
    draw = random.Random(3)
    values = [round(draw.uniform(0, 1), 1) for _ in range(300)]
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode,
        factor=0.9,
        patience=2,
        threshold=0.05,
        threshold_mode="abs",
        cooldown=3,
        min_lr=1e-3,
        eps=0,
    )
    expected = []
    for value in values:
        theirs.step(value)
        expected.append(optimizer.param_groups[0]["lr"])
    hook = Plateau(
        f"{sign}test/loss", factor=0.9, patience=3, min_delta=0.05, cooldown=3, min_factor=1e-3
    )
    assert factors(hook, *values) == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < 0.01


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"factor": 1.0}, "factor = 1.0: expected a number above 0 and below 1"),
        ({"patience": 0}, "patience = 0"),
        ({"min_delta": -1.0}, "min_delta = -1.0"),
        ({"cooldown": -1}, "cooldown = -1"),
        ({"min_factor": 1.0}, "min_factor = 1.0"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Plateau("test/loss", **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of which every test after the first lowers the learning rate."""
    folder = tmp_path_factory.mktemp("plateau") / "whole"
    train(folder, NEVER_BETTER, COSINE)
    return folder


def test_it_is_in_the_log_and_in_every_record(whole: Path) -> None:
    lrs = [record["lr"] for record in records(whole) if record["kind"] == "step"]
    cosine = SCHEDULES.build(
        "cosine", facts={"updates": 15, "updates_per_epoch": 5.0, "batch_size": 24}
    )
    base = lrs[0]
    assert lrs == pytest.approx(
        [base * (0.5 if update >= 10 else 1.0) * cosine(update / 15) for update in range(15)]
    )
    logged = (whole / "log.txt").read_text()
    assert re.search(r"plateau: test/loss .*1 time.* 0\.5 .*\(was 1\)", logged)


@pytest.mark.by_default("16")
@pytest.mark.parametrize("steps", [9, 16])  # before the first reduction, and after it
def test_a_killed_run_lowers_it_where_an_unbroken_one_does(
    tmp_path: Path, whole: Path, steps: int
) -> None:
    run_until_killed(
        tmp_path / "run",
        NEVER_BETTER,
        COSINE,
        hooks={"save": SaveEachStep(), "kill": KillAfter(steps)},
    )
    train(tmp_path / "run", NEVER_BETTER, COSINE)
    assert differences_of_runs(whole, tmp_path / "run") == []


@pytest.mark.slow
def test_without_its_state_the_resumed_run_differs(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until_killed(
        tmp_path / "run", NEVER_BETTER, COSINE, hooks={"save": SaveEachStep(), "kill": KillAfter(9)}
    )
    monkeypatch.setattr(Plateau, "load_state_dict", lambda _hook, _state: None)
    train(tmp_path / "run", NEVER_BETTER, COSINE)
    assert differences_of_runs(whole, tmp_path / "run") != []


def test_changed_factor_needs_consent(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    other = NEVER_BETTER.replace("0.5", "0.25")
    key = "HOOKS.plateau.factor"
    with raises(ChangedError, code="resume.adjustable_key", key=key, given="0.25"):
        train(tmp_path / "run", other, COSINE)
    longer = ("PHASES.epochs=4", "RUN.allow=[HOOKS.plateau, PHASES.epochs]")
    train(tmp_path / "run", other, COSINE, *longer)
    assert (
        newest(tmp_path / "run").state["task"]["updater"]["factor"] == 0.25 * 0.25
    )  # two tests by 0.5, one by 0.25
