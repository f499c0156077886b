"""A fork of a run, resumed, has every bit of a run from scratch."""

import json
import shutil
from pathlib import Path

import pytest
from harness import (
    SMALL,
    KillAfter,
    differences_of_runs,
    ledger_bytes,
    newest,
    records,
    run_until_killed,
    status,
    train,
)
from raising import raises

from phasetrain.addons.experiments.fork.fork_run import fork_run, list_fork_updates
from phasetrain.app.setup import resolve_config
from phasetrain.checkpoint.commit import Manifest
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runs.ledger import HEADER_BYTES

RECORD_BYTES = 92
"""Size of a record in the version that new runs write."""

TWO = ("PHASES.epochs=2", "MODEL.width=2")
EARLY = "OPTIMIZER.SCHEDULES.lr={name: multistep, milestones: [3 updates]}"
LATE = "OPTIMIZER.SCHEDULES.lr={name: multistep, milestones: [7 updates]}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a late milestone, from scratch."""
    folder = tmp_path_factory.mktemp("scratch") / "run"
    train(folder, *TWO, LATE)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with an early milestone, with a checkpoint after each update."""
    folder = tmp_path_factory.mktemp("source") / "run"
    train(folder, *TWO, EARLY, "CHECKPOINT.every_updates=1", "CHECKPOINT.keep_every.updates=1")
    return folder


@pytest.mark.feature(
    "fork",
    "a fork of a run at an update ends as the run from scratch",
    "`phasetrain.addons.experiments.fork.fork_run.fork_run`",
)
@pytest.mark.parametrize("update", [1, 3])
def test_fork_with_another_config_ends_as_the_run_from_scratch(
    scratch: Path, source: Path, tmp_path: Path, update: int
) -> None:
    assert differences_of_runs(scratch, source) != []  # negative control: the configs differ
    before = sorted((path, path.stat().st_mtime_ns) for path in source.rglob("*"))
    fork_run(str(source), update, str(tmp_path / "fork"))
    assert sorted((path, path.stat().st_mtime_ns) for path in source.rglob("*")) == before
    assert len(ledger_bytes(tmp_path / "fork")) == HEADER_BYTES + update * RECORD_BYTES
    assert [one["updates"] for one in records(tmp_path / "fork")] == list(range(1, update + 1))
    done = train(tmp_path / "fork", *TWO, LATE)
    assert (done.state, done.updates) == ("finished", 10)
    assert differences_of_runs(scratch, tmp_path / "fork") == []
    found = status(tmp_path / "fork")
    assert (found["attempt"], found["resumed_at"]) == (1, update)
    deviations = json.loads((tmp_path / "fork" / "environment.json").read_text())["departures"]
    assert deviations == []


def test_fork_has_a_run_of_its_own(source: Path, tmp_path: Path) -> None:
    path = fork_run(str(source), 3, str(tmp_path / "fork"))
    manifest = Manifest.decode(Path(path, "manifest.json").read_bytes())
    assert manifest.run != newest(source).manifest.run
    assert (manifest.state["updates"], manifest.state["finished"]) == (3, "")
    assert list_fork_updates(str(tmp_path / "fork")) == [1, 2, 3]


def test_killed_fork_resumes_exactly(scratch: Path, source: Path, tmp_path: Path) -> None:
    fork_run(str(source), 3, str(tmp_path / "fork"))
    never = "CHECKPOINT.every_epochs=null"
    run_until_killed(tmp_path / "fork", *TWO, LATE, never, hooks={"kill": KillAfter(2)})
    train(tmp_path / "fork", *TWO, LATE)
    assert differences_of_runs(scratch, tmp_path / "fork") == []


def test_finished_run_is_forked_into_a_longer_one(tmp_path: Path) -> None:
    words = ("MODEL.width=2", "OPTIMIZER.SCHEDULES.lr=constant")
    train(tmp_path / "short", *words, "PHASES.epochs=1")
    train(tmp_path / "long", *words, "PHASES.epochs=2")
    fork_run(str(tmp_path / "short"), 5, str(tmp_path / "fork"))
    train(tmp_path / "fork", *words, "PHASES.epochs=2")
    assert differences_of_runs(tmp_path / "long", tmp_path / "fork") == []


def test_fork_for_a_config_rejects_another_one(source: Path, scratch: Path, tmp_path: Path) -> None:
    target = tmp_path / "fork"
    setup = resolve_config([*SMALL, *TWO, LATE, f"RUN.dir={target}"])
    fork_run(str(source), 3, str(target), setup=setup)
    with raises(ChangedError):
        train(target, *TWO, EARLY)
    train(target, *TWO, LATE)
    assert differences_of_runs(scratch, target) == []


def test_fork_that_was_killed_is_made_again(source: Path, tmp_path: Path) -> None:
    fork_run(str(source), 3, str(tmp_path / "fork"))
    shutil.rmtree(tmp_path / "fork" / "checkpoints" / "p0000-s00000003")
    (tmp_path / "fork" / "metrics.jsonl").write_text("torn")
    fork_run(str(source), 2, str(tmp_path / "fork"))
    assert list_fork_updates(str(tmp_path / "fork")) == [1, 2]
    assert [one["updates"] for one in records(tmp_path / "fork")] == [1, 2]


class TestRejected:
    def test_missing_checkpoint_lists_the_others(self, source: Path, tmp_path: Path) -> None:
        with raises(ConfigError, code="fork.no_checkpoint"):
            fork_run(str(source), 11, str(tmp_path / "fork"))
        assert not (tmp_path / "fork").exists()

    def test_folder_with_a_run_is_left_alone(self, source: Path, scratch: Path) -> None:
        before = sorted(path.name for path in scratch.iterdir())
        with raises(ConfigError, code="fork.target_not_empty"):
            fork_run(str(source), 3, str(scratch))
        assert sorted(path.name for path in scratch.iterdir()) == before

    def test_folder_without_a_run(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="run.not_found"):
            fork_run(str(tmp_path / "none"), 3, str(tmp_path / "fork"))

    def test_other_version(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "phasetrain.addons.experiments.fork.fork_run.list_packages", lambda: {"torch": "0.1"}
        )
        with raises(ConfigError, code="fork.other_version"):
            fork_run(str(source), 3, str(tmp_path / "fork"))
        assert not (tmp_path / "fork").exists()

    def test_damaged_checkpoint(self, source: Path, tmp_path: Path) -> None:
        shutil.copytree(source, tmp_path / "copy", symlinks=True)
        path = tmp_path / "copy" / "checkpoints" / "p0000-s00000003" / "tensors.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with raises(ConfigError, code="fork.no_checkpoint"):
            fork_run(str(tmp_path / "copy"), 3, str(tmp_path / "fork"))

    def test_plan_that_differs_before_the_fork(self, source: Path, tmp_path: Path) -> None:
        fork_run(str(source), 3, str(tmp_path / "fork"))
        with raises(ChangedError, code="fork.plan_differs"):
            train(tmp_path / "fork", *TWO, EARLY, "PHASES.test_every.updates=2")
