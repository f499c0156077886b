"""Decisions of a pruned sweep; runs are played by a function, which writes what a run leaves
behind."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.experiments.sweep.jobs import Job
from phasetrain.addons.experiments.sweep.override_text import SweepOverrides, hash_overrides
from phasetrain.addons.experiments.sweep.prune.pruned_sweep import PrunedSweep
from phasetrain.addons.experiments.sweep.prune.rungs import TrialPlan
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.addons.experiments.sweep.prune_record import PruneRecord
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.errors import ConfigError, FolderInUseError

HALVING = PruneSettings("halving", 3, 1, "epochs")
UPDATES = 18
TESTS = tuple(range(2, UPDATES + 1, 2))  # an epoch has two updates

GRID = [[f"OPTIMIZER.lr={rate}", f"MODEL.width={width}"] for rate in range(9) for width in range(3)]


class Killed(BaseException):
    """What SIGKILL is to a process."""


def measure(words: Sequence[str], updates: int) -> float:
    """Return the accuracy of a run after some updates: the ranks change on the way."""
    values = dict(word.split("=") for word in words)
    rate = float(values["OPTIMIZER.lr"])
    return 1 - 1 / (1 + updates * (1 + rate) / (9 + rate**2)) + float(values["MODEL.width"]) / 100


class Player:
    """Plays runs update by update.

    Args:
        job: settings of the sweep.
        kills: updates, counted over all runs, at which something is killed: the sweep if the value
            is True, else the run alone.
        bad: word -> exit code of runs that fail after 3 updates, or NaN for ones that diverge.
    """

    def __init__(
        self,
        job: Job,
        kills: Mapping[int, bool] | None = None,
        bad: Mapping[str, float] | None = None,
    ) -> None:
        self.job, self.kills, self.bad = job, dict(kills or {}), dict(bad or {})
        self.launches: list[dict[str, int | None]] = []
        self.made = 0

    def __call__(self, runs: Sequence[tuple[int, Sequence[str]]], pauses: Mapping[str, int]) -> int:
        names = [hash_overrides([*self.job.fixed, *words]) for _, words in runs]
        self.launches.append({name: pauses.get(name) for name in names})
        for name, (_, words) in zip(names, runs, strict=True):
            record = self.job.make_record(words)
            code = self._run(Path(record.folder), words, pauses.get(name, UPDATES))
            replace(record, exit_code=code).write(self.job.folder)
        return 0

    def _run(self, folder: Path, words: Sequence[str], end: int) -> int:
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(f"RUN:\n  pause_at: {end}\n  words: {sorted(words)}\n")
        (folder / "plan.json").write_text(f'{{\n "updates": {UPDATES}\n}}')
        status = folder / "status.json"
        done = json.loads(status.read_text())["updates"] if status.is_file() else 0
        code = next((self.bad[word] for word in words if word in self.bad), 0)
        while done < end:
            if done == 3 and code and not math.isnan(code):
                status.write_text(json.dumps({"state": "failed", "updates": done}))
                return int(code)
            self.made += 1
            done += 1
            status.write_text(json.dumps({"state": "killed", "updates": done}))
            if done in TESTS:
                value = code if math.isnan(code) else measure(words, done)
                line = {"kind": "phase", "split": "test", "epoch": 0, "updates": done}
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({**line, "metrics": {"accuracy": value}}) + "\n")
            if (stops := self.kills.pop(self.made, None)) is not None:
                if stops:
                    raise Killed
                return 137
        state = "finished" if end == UPDATES else "paused"
        status.write_text(json.dumps({"state": state, "updates": done}))
        return 0


def make_plan(overrides: Sequence[str], monitor: str) -> TrialPlan:
    words = [word for word in overrides if word.startswith(("OPTIMIZER.lr", "MODEL.width"))]
    return TrialPlan(UPDATES, TESTS, TESTS, f"RUN:\n\n  words: {sorted(words)}\n")


def sweep(
    folder: Path, settings: PruneSettings = HALVING, **played: Mapping[object, float]
) -> tuple[PrunedSweep, Player]:
    folder.mkdir(exist_ok=True)
    job = Job(
        command=(), fixed=("LOSS=mse",), folder=str(folder), sweep="x", monitor="test/accuracy"
    )
    player = Player(job, **played)
    lines: list[str] = []
    return PrunedSweep(job, settings, "test/accuracy", make_plan, player, lines.append), player


def run_grid(made: PrunedSweep, grid: Sequence[Sequence[str]] = GRID) -> int:
    made.prepare(grid, len(grid))
    return made.run_grid(grid)


def read_states(folder: Path) -> dict[str, tuple[str, int, int]]:
    found = Results.read(str(folder), "test/accuracy").runs
    return {one.name: (one.state, one.rung, one.updates) for one in found}


def test_promoted_runs_continue_and_the_others_stay_paused(tmp_path: Path) -> None:
    made, player = sweep(tmp_path)
    assert run_grid(made) == 0
    assert [len(launch) for launch in player.launches] == [27, 9, 3]
    assert [set(launch.values()) for launch in player.launches] == [{2}, {6}, {None}]
    states = sorted(read_states(tmp_path).values())
    assert states == [("finished", 3, 18)] * 3 + [("paused", 1, 2)] * 18 + [("paused", 2, 6)] * 6
    # 27 * 2 + 9 * 4 + 3 * 12: 26 % of the grid
    assert player.made == 126
    best = sorted(GRID, key=lambda words: -measure(words, 2))[:9]
    assert set(player.launches[1]) == {hash_overrides(["LOSS=mse", *words]) for words in best}


def test_the_table_and_the_json_show_rungs_and_updates(tmp_path: Path) -> None:
    made, _ = sweep(tmp_path)
    run_grid(made)
    results = Results.read(str(tmp_path), "test/accuracy")
    assert results.title().endswith("; 126 of 486 updates (26 %)")
    names, rows = results.make_table()
    assert [row[names.index("rung")] for row in rows] == ["3/3"] * 3 + ["2/3"] * 6 + ["1/3"] * 18
    content = json.loads(results.format_json())
    assert [one["rung"] for one in content["runs"][:4]] == [3, 3, 3, 2]
    decisions = content["prune"]["decisions"]
    assert [(one["rung"], len(one["values"])) for one in decisions] == [(1, 27), (2, 9)]
    assert content["prune"]["settings"] == {
        "name": "halving",
        "eta": 3,
        "min": "1 epoch",
        "monitor": "test/accuracy",
    }
    assert not any(one.error for one in results.runs)


@pytest.mark.feature(
    "sweep.prune",
    "pruned sweeps: successive halving and Hyperband by pause and exact resume; a killed sweep "
    "promotes the same runs",
    "`hydra.sweeper.prune`, `prune.json`",
)
@pytest.mark.by_default("halving-0")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("method", ["halving", "hyperband"])
def test_a_killed_sweep_makes_the_decisions_of_an_unbroken_one(
    tmp_path: Path, method: str, seed: int
) -> None:
    settings = PruneSettings(method, 3, 1, "epochs")
    run_grid(sweep(tmp_path / "whole", settings)[0])
    draw = random.Random(seed)
    # Each attempt is killed: a run alone, several times, then the sweep.
    for _ in range(5):
        kills = {draw.randint(1, 60): False for _ in range(5)} | {draw.randint(1, 60): True}
        broken, _ = sweep(tmp_path / "broken", settings, kills=kills)
        try:
            run_grid(broken)
        except Killed:
            continue
    run_grid(sweep(tmp_path / "broken", settings)[0])
    assert read_states(tmp_path / "broken") == read_states(tmp_path / "whole")
    text = [(tmp_path / name / "prune.json").read_text() for name in ("broken", "whole")]
    assert text[0] == text[1]


def test_the_same_command_again_starts_nothing(tmp_path: Path) -> None:
    run_grid(sweep(tmp_path)[0])
    again, player = sweep(tmp_path)
    assert run_grid(again) == 0
    assert player.launches == []


def test_more_values_continue_the_study(tmp_path: Path) -> None:
    run_grid(sweep(tmp_path / "a")[0], GRID[:18])
    more, player = sweep(tmp_path / "a")
    run_grid(more)
    assert len(player.launches[0]) == 9
    run_grid(sweep(tmp_path / "b")[0])
    found = [PruneRecord.read(str(tmp_path / name)) for name in "ab"]
    assert found[0].decisions == found[1].decisions


def test_without_min_more_values_keep_the_rungs(tmp_path: Path) -> None:
    settings = PruneSettings("halving", 2)
    few, player = sweep(tmp_path, settings)
    run_grid(few, GRID[:4])
    assert set(player.launches[0].values()) == {6}  # 18 / 4, at the next test
    more, player = sweep(tmp_path, settings)
    run_grid(more)
    assert set(player.launches[0].values()) == {6}
    assert len(player.launches[0]) == 23


def test_failed_and_diverged_runs_are_not_promoted_and_do_not_stop_the_others(
    tmp_path: Path,
) -> None:
    bad = {"OPTIMIZER.lr=2": math.nan, "OPTIMIZER.lr=3": 1}
    made, player = sweep(tmp_path, bad=bad)
    assert run_grid(made) == 0
    assert [len(launch) for launch in player.launches] == [27, 9, 3]
    record = PruneRecord.read(str(tmp_path))
    assert len([one for one in record.decisions[0]["values"].values() if one is None]) == 3
    failed = {hash_overrides(["LOSS=mse", *words]) for words in GRID if "OPTIMIZER.lr=3" in words}
    # they fail at update 3, on the way to the second rung
    assert failed & set(player.launches[1])
    assert not failed & set(player.launches[2])
    # A failed run is started again by the same command, as in a sweep that is not pruned.
    again, player = sweep(tmp_path)
    run_grid(again)
    assert set(player.launches[0]) >= failed & set(record.decisions[0]["promoted"])


def test_a_run_that_is_killed_without_progress_fails_after_three_attempts(tmp_path: Path) -> None:
    made, player = sweep(tmp_path, bad={"OPTIMIZER.lr=8": 137})
    run_grid(made)
    counts = [
        sum(name in launch for launch in player.launches)
        for name in [hash_overrides(["LOSS=mse", *words]) for words in GRID[24:]]
    ]
    # The first rung, and if promoted: one attempt up to update 3, and three without progress.
    assert max(counts) in (1, 5)
    assert len(player.launches) <= 7


def test_a_run_in_use_by_another_process_ends_the_sweep_without_a_decision(tmp_path: Path) -> None:
    code = FolderInUseError.exit_code
    settings = PruneSettings("halving", 3, 2, "epochs")
    made, _ = sweep(tmp_path, settings, bad={"OPTIMIZER.lr=8": code})
    assert run_grid(made, GRID) == code
    assert PruneRecord.read(str(tmp_path)).decisions == ()


@pytest.mark.parametrize(
    "settings",
    [
        PruneSettings("hyperband", 3, 1, "epochs"),
        PruneSettings("halving", 2, 1, "epochs"),
        PruneSettings("halving", 3, 2, "epochs"),
        PruneSettings("halving", 3),
    ],
)
def test_changed_settings_are_rejected_and_nothing_starts(
    tmp_path: Path, settings: PruneSettings
) -> None:
    run_grid(sweep(tmp_path)[0])
    before = (tmp_path / "prune.json").read_text()
    with raises(ConfigError, code="sweep.prune_changed"):
        sweep(tmp_path, settings)
    assert (tmp_path / "prune.json").read_text() == before


def test_a_run_with_another_config_than_before_is_started_again(tmp_path: Path) -> None:
    run_grid(sweep(tmp_path)[0])
    name = hash_overrides(["LOSS=mse", *GRID[0]])
    (tmp_path / name / "config.yaml").write_text("RUN:\n  pause_at: 2\n  words: other\n")
    again, player = sweep(tmp_path)
    run_grid(again)
    assert [set(launch) for launch in player.launches] == [{name}]


def test_brackets_of_hyperband_begin_at_different_rungs(tmp_path: Path) -> None:
    made, player = sweep(tmp_path, PruneSettings("hyperband", 3, 1, "epochs"))
    run_grid(made)
    first = list(player.launches[0].values())
    assert [first.count(pause) for pause in (2, 6, None)] == [18, 6, 3]
    record = PruneRecord.read(str(tmp_path))
    found = [(one["bracket"], one["rung"], len(one["promoted"])) for one in record.decisions]
    assert found == [(1, 1, 6), (1, 2, 2), (2, 2, 2)]
    assert [state for state, _, _ in read_states(tmp_path).values()].count("finished") == 7


def test_no_metric_is_rejected(tmp_path: Path) -> None:
    job = Job(command=(), fixed=(), folder=str(tmp_path), sweep="x")
    with raises(ConfigError, code="sweep.no_monitor"):
        PrunedSweep(job, HALVING, "", make_plan, Player(job), print)


STUDY = (
    "OPTIMIZER.lr=interval(0,8)",
    "MODEL.width=0,1,2",
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_jobs=3",
)


def run_study(
    folder: Path, count: int, settings: PruneSettings = HALVING, **played: Mapping[object, float]
) -> Player:
    pytest.importorskip("optuna")
    made, player = sweep(folder, settings, **played)
    made.prepare(GRID[:1], count)
    assert made.run_trials(SweepOverrides.read(STUDY), count) == 0
    return player


@pytest.mark.by_default("halving")
@pytest.mark.parametrize("method", ["halving", "hyperband"])
def test_a_killed_study_draws_and_decides_like_an_unbroken_one(tmp_path: Path, method: str) -> None:
    settings = PruneSettings(method, 3, 1, "epochs")
    run_study(tmp_path / "whole", 17, settings)
    for at in (5, 17, 22):
        with pytest.raises(Killed):
            run_study(tmp_path / "broken", 17, settings, kills={3: False, at: True})
    run_study(tmp_path / "broken", 17, settings)
    found = [PruneRecord.read(str(tmp_path / name)) for name in ("broken", "whole")]
    assert found[0].decisions == found[1].decisions
    assert read_states(tmp_path / "broken") == read_states(tmp_path / "whole")


def test_more_trials_continue_the_study(tmp_path: Path) -> None:
    run_study(tmp_path / "a", 9)
    run_study(tmp_path / "a", 15)
    run_study(tmp_path / "b", 15)
    found = [PruneRecord.read(str(tmp_path / name)) for name in "ab"]
    assert found[0].decisions == found[1].decisions
    assert len(found[0].rungs) == 15
