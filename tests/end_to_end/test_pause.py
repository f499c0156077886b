"""`RUN.pause_at` ends a run after an update, and the same command without it continues: every bit as
if there had been no pause."""

from pathlib import Path

import pytest
from harness import SMALL, differences_of_runs, newest, records, status, train
from processes import Launcher

from phasetrain.app.stored.stored_config import read_newest_command
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook
from phasetrain.hooks.base import Run

TWO = ("PHASES.epochs=2", "MODEL.width=2")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two epochs of five updates that did not pause."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    train(folder, *TWO)
    return folder


@pytest.mark.feature(
    "pause",
    "pausing after a number of updates, and continuing with the same bits",
    "`RUN.pause_at`",
)
@pytest.mark.parametrize(
    ("at", "phase", "step"),
    [
        pytest.param(3, 0, 3, id="in an epoch"),
        pytest.param(5, 2, 0, id="after the test that ends an epoch"),
        pytest.param(6, 2, 1, id="after the first update of an epoch"),
    ],
)
def test_paused_run_continues_with_the_same_bits(
    unbroken: Path, tmp_path: Path, at: int, phase: int, step: int
) -> None:
    paused = train(tmp_path, *TWO, f"RUN.pause_at={at}")
    assert (paused.state, paused.exit_code, paused.updates) == ("paused", 0, at)
    assert paused.reason == f"RUN.pause_at = {at}"
    state = newest(tmp_path).manifest.state
    assert (state["phase"], state["step"], state["updates"]) == (phase, step, at)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("paused", 0)
    assert train(tmp_path, *TWO).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []


def test_run_pauses_several_times(unbroken: Path, tmp_path: Path) -> None:
    updates = [train(tmp_path, *TWO, f"RUN.pause_at={at}").updates for at in (2, 1, 7, 10)]
    assert updates == [2, 2, 7, 10]
    assert status(tmp_path)["state"] == "finished"  # nothing is left after update 10
    assert differences_of_runs(unbroken, tmp_path) == []


def test_paused_run_has_the_metrics_of_its_tests(unbroken: Path, tmp_path: Path) -> None:
    train(tmp_path, *TWO, "RUN.pause_at=5")
    found = records(tmp_path)
    assert found == records(unbroken)[: len(found)]
    assert [one["split"] for one in found if one["kind"] == "phase"] == ["train", "test"]


def test_pause_saves_whatever_the_rules_for_checkpoints_say(tmp_path: Path) -> None:
    rules = ("CHECKPOINT.every_epochs=null", "CHECKPOINT.at_end=false", "RUN.pause_at=2")
    assert train(tmp_path, *TWO, *rules, "CHECKPOINT.grace_seconds=1e-9").updates == 2
    assert newest(tmp_path).manifest.facts.why == "pause"


def test_pause_with_accumulated_gradients_keeps_the_bits(tmp_path: Path) -> None:
    words = (*TWO, "OPTIMIZER.accumulate=3", "PHASES.test_every.updates=2")
    train(tmp_path / "one", *words)
    train(tmp_path / "two", *words, "RUN.pause_at=4")
    train(tmp_path / "two", *words)
    assert differences_of_runs(tmp_path / "one", tmp_path / "two") == []


class StopAt(Hook):
    """Asks to end the run for good after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Stop at the update."""
        if run.state.updates == self.update:
            run.stop("enough")


def test_run_that_ends_at_the_update_of_the_pause_has_finished(tmp_path: Path) -> None:
    done = train(tmp_path, *TWO, "RUN.pause_at=3", hooks={"stop": StopAt(3)})
    assert (done.state, done.reason, done.updates) == ("finished", "enough", 3)


def test_next_command_on_the_folder_does_not_pause_again(tmp_path: Path) -> None:
    train(tmp_path, *TWO, "RUN.pause_at=2")
    stored = read_newest_command(str(tmp_path))
    assert "pause_at" not in stored.values["RUN"]
    assert not [word for word in stored.overrides if "pause_at" in word]
    assert "pause_at" not in (tmp_path / "reproduce.sh").read_text()


def test_pause_keeps_the_bits_of_weights_with_channels_last(tmp_path: Path) -> None:
    words = (*TWO, "MODEL={name: small_cnn, width: 4, ema: {}}", "MACHINE.channels_last=true")
    train(tmp_path / "one", *words)
    train(tmp_path / "two", *words, "RUN.pause_at=3")
    train(tmp_path / "two", *words)
    assert differences_of_runs(tmp_path / "one", tmp_path / "two") == []


@pytest.mark.feature("pause")
@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 5])
def test_paused_run_of_two_ranks_continues_with_the_same_bits(
    launcher: Launcher, tmp_path: Path, at: int
) -> None:
    words = (*SMALL, *TWO, "MACHINE.threads=1")
    assert launcher.run(tmp_path / "one", 2, *words).codes == [0, 0]
    paused = launcher.run(tmp_path / "two", 2, *words, f"RUN.pause_at={at}")
    assert paused.codes == [0, 0], paused.outputs
    assert (status(tmp_path / "two")["state"], status(tmp_path / "two")["updates"]) == (
        "paused",
        at,
    )
    assert launcher.run(tmp_path / "two", 2, *words).codes == [0, 0]
    assert differences_of_runs(tmp_path / "one", tmp_path / "two") == []


@pytest.mark.feature("fork")
@pytest.mark.addon("experiments")
@pytest.mark.slow
def test_fork_of_two_ranks_ends_as_the_run_from_scratch(launcher: Launcher, tmp_path: Path) -> None:
    from phasetrain.addons.experiments.fork.fork_run import fork_run

    early, late = (
        f"OPTIMIZER.SCHEDULES.lr={{name: multistep, milestones: [{at} updates]}}" for at in (3, 7)
    )
    words = (*SMALL, *TWO, "MACHINE.threads=1", "OPTIMIZER.accumulate=2")
    assert launcher.run(tmp_path / "one", 2, *words, late).codes == [0, 0]
    assert launcher.run(tmp_path / "two", 2, *words, early, "RUN.pause_at=3").codes == [0, 0]
    fork_run(str(tmp_path / "two"), 3, str(tmp_path / "fork"))
    done = launcher.run(tmp_path / "fork", 2, *words, late)
    assert done.codes == [0, 0], done.outputs
    assert differences_of_runs(tmp_path / "one", tmp_path / "fork") == []
