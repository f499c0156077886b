"""Saving beside the training: what is written is the step it was taken at, and errors come up
between two steps."""

import errno
import io
import json
import math
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import Died, Refusing
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    run_until_killed,
    train,
)
from raising import raises

from phasetrain.app.api import run
from phasetrain.checkpoint import Checkpointer
from phasetrain.errors import ConfigError, FolderInUseError, SaveError
from phasetrain.hooks import CheckpointHook, Hook
from phasetrain.hooks.checkpoint import SaveTimer
from phasetrain.runtime.clock import DAY
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Task
from phasetrain.testing.build import resolve_overrides

Before = Callable[[str, str], None]


class Remembering(torch.optim.SGD):
    """Keeps its last steps in a deque, which no checkpoint can hold."""

    def step(self, closure: Any = None) -> Any:
        self.state["recent"].setdefault("steps", deque(maxlen=3)).append(1)
        return super().step(closure)


def test_state_that_the_first_update_makes_is_checked(tmp_path: Path) -> None:
    optimizer = f"OPTIMIZER={{name: {__name__}.Remembering, lr: 0.1}}"
    with raises(ConfigError, code="checkpoint.not_encodable") as caught:
        train(tmp_path, optimizer)
    assert "deque" in str(caught.value)
    assert status(tmp_path)["updates"] == 1


class Door(Hook):
    """Puts a door with failpoints before the checkpoints, once the run has begun."""

    observe_only = True

    def __init__(self, before: Before) -> None:
        self.before = before

    def on_start(self, run: Any) -> None:
        self.hook: CheckpointHook = run.hooks.by_label["checkpoint"]
        self.hook.checkpointer.storage = Storage(self.before)


class Steps(Hook):
    """Tells how many train steps are complete."""

    def __init__(self, happened: Callable[[int], None]) -> None:
        self.happened = happened

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if phase.is_train:
            self.happened(run.state.updates)


def status(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "status.json").read_text())
    assert isinstance(found, dict)
    return found


def log_of(folder: Path) -> str:
    return (folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder)
    return folder


class TestBesideTheTraining:
    def events(self, folder: Path, background: bool) -> list[str]:
        """Return what happens in what order, where the first save waits for the training to go on,
        if it may."""
        found: list[str] = []
        moved = threading.Event()

        def before(operation: str, path: str) -> None:
            if operation == "write" and path.endswith("tensors.safetensors") and not found:
                found.append("writes")
                found.append(
                    "training went on" if moved.wait(10 if background else 0.3) else "nobody moved"
                )

        def step(updates: int) -> None:
            if updates == 7:
                moved.set()

        train(
            folder,
            f"CHECKPOINT.background={str(background).lower()}",
            "PHASES.epochs=2",
            "RUN.exact=false",  # `before` keeps what it has found
            hooks={"door": Door(before), "steps": Steps(step)},
        )
        return found

    def test_steps_continue_while_a_checkpoint_is_written(self, tmp_path: Path) -> None:
        assert self.events(tmp_path, background=True) == ["writes", "training went on"]

    def test_steps_wait_without_background_saves(self, tmp_path: Path) -> None:
        assert self.events(tmp_path, background=False) == ["writes", "nobody moved"]

    def test_a_checkpoint_holds_the_step_it_was_taken_at(self, tmp_path: Path) -> None:
        """F47: each write begins only after two more updates have changed the weights."""
        taken: dict[str, torch.Tensor] = {}
        written: dict[str, torch.Tensor] = {}
        moved = threading.Event()

        class Look(Hook):
            def on_save(self, run: Any) -> None:
                taken[f"p{run.state.phase:04d}-s{run.state.step:08d}"] = self.weights(run)
                moved.clear()

            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                self.run = run
                if run.state.updates % 5 == 2 and phase.is_train:
                    moved.set()

            def weights(self, run: Any) -> torch.Tensor:
                return torch.cat(
                    [
                        parameter.detach().flatten().clone()
                        for parameter in run.task.model.parameters()
                    ]
                )

        look = Look()

        def before(operation: str, path: str) -> None:
            if operation == "create" and path.endswith("tensors.safetensors"):
                moved.wait(0.5 if "p0006" in path or "p0005" in path else 10)
                written[path.split("/")[-2].partition(".")[0]] = look.weights(look.run)

        train(tmp_path, "CHECKPOINT.keep_last=9", hooks={"look": look, "door": Door(before)})
        made = Checkpointer(f"{tmp_path}/checkpoints", Storage())
        names = [saved.name for saved in made.list_checkpoints()]
        assert names == ["p0001-s00000000", "p0003-s00000000", "p0005-s00000000", "p0006-s00000000"]
        for name in names:
            model = made.load(f"{tmp_path}/checkpoints/{name}").state["task"]["model"]
            kept = [
                value.flatten() for key, value in model.items() if key.endswith(("weight", "bias"))
            ]
            assert torch.equal(torch.cat(kept).sort().values, taken[name].sort().values)
        changed = [not torch.equal(taken[name], written[name]) for name in names]
        assert changed == [True, True, False, False]  # after the last update nothing changes

    def test_one_save_at_a_time(self, tmp_path: Path) -> None:
        seen: list[tuple[str, str]] = []

        def before(operation: str, path: str) -> None:
            name = path.rpartition("/")[2]
            if operation == "make_folder" and ".tmp-" in name:
                seen.append(("begin", name.partition(".")[0]))
            if operation == "rename" and name.startswith("p"):
                threading.Event().wait(0.02)
                seen.append(("publish", name))

        train(tmp_path, "PHASES.epochs=1", hooks={"door": Door(before), "save": SaveEachStep()})
        assert len(seen) == 2 * 9
        pairs = list(zip(seen[::2], seen[1::2], strict=True))
        assert all((one, other) == (("begin", one[1]), ("publish", one[1])) for one, other in pairs)


class TestErrors:
    def failing(self, *names: str) -> Before:
        """Refuse the tensors of these checkpoints."""

        def before(operation: str, path: str) -> None:
            if any(f"/{name}." in path for name in names):
                Refusing("write", "tensors.safetensors")(operation, path)

        return before

    @pytest.mark.by_default("true")
    @pytest.mark.parametrize("background", ["true", "false"])
    def test_training_continues_and_counts_failed_saves(
        self, tmp_path: Path, unbroken: Path, background: str
    ) -> None:
        door = Door(self.failing("p0001-s00000000", "p0003-s00000000"))
        result = train(tmp_path, f"CHECKPOINT.background={background}", hooks={"door": door})
        assert (result.state, status(tmp_path)["save_failures"], door.hook.failures) == (
            "finished",
            2,
            2,
        )
        assert door.hook.saves == 2
        told = [line for line in log_of(tmp_path).splitlines() if "could not be saved" in line]
        assert len(told) == 2
        assert re.search(r"WARNING .* update 5 ", told[0])
        assert f"(errno {errno.ENOSPC} ENOSPC) at {tmp_path}/checkpoints/p0001" in told[0]
        assert "CHECKPOINT.on_save_error = 'continue'" in told[0]
        assert differences_of_runs(tmp_path, unbroken) == []
        assert leftovers(tmp_path) == []

    def test_failed_save_stops_the_run_at_the_next_step_if_configured(
        self, tmp_path: Path, unbroken: Path
    ) -> None:
        steps: list[int] = []
        door = Door(self.failing("p0003-s00000000"))
        with pytest.raises(SaveError, match="update 10 "):
            train(
                tmp_path,
                "CHECKPOINT.on_save_error=stop",
                hooks={"door": door, "steps": Steps(steps.append)},
            )
        assert 10 <= steps[-1] <= 15
        found = status(tmp_path)
        assert (found["state"], found["exit_code"], found["save_failures"]) == ("failed", 1, 1)
        assert newest(tmp_path).manifest.state["updates"] == 5
        assert leftovers(tmp_path) == []
        train(tmp_path)
        assert differences_of_runs(tmp_path, unbroken) == []

    @pytest.mark.by_default("true")
    @pytest.mark.parametrize("background", ["true", "false"])
    def test_run_whose_last_save_fails_resumes_from_the_one_before(
        self, tmp_path: Path, unbroken: Path, background: str
    ) -> None:
        door, words = (
            Door(self.failing("p0006-s00000000")),
            (f"CHECKPOINT.background={background}",),
        )
        with pytest.raises(SaveError):
            train(tmp_path, *words, hooks={"door": door})
        assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 1)
        train(tmp_path)
        assert differences_of_runs(tmp_path, unbroken) == []

    def test_a_state_that_can_no_longer_be_saved(self, tmp_path: Path) -> None:
        class Late(Hook):
            updates = 0

            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                self.updates = run.state.updates

            def state_dict(self) -> dict[str, Any]:
                return {"seen": {1, 2} if 5 < self.updates < 15 else [1, 2]}

        assert train(tmp_path, hooks={"late": Late()}).state == "finished"
        assert status(tmp_path)["save_failures"] == 1
        assert re.search("the checkpoint at update 10 .* hooks.late.seen: ", log_of(tmp_path))

    def test_logs_that_cannot_be_made_durable_fail_the_save(self, tmp_path: Path) -> None:
        class Full(Hook):
            def on_start(self, run: Any) -> None:
                run.folder.sync_logs = self.refuse

            def refuse(self) -> None:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

        with pytest.raises(SaveError):
            train(tmp_path, "PHASES.epochs=1", hooks={"full": Full()})
        assert f"'{tmp_path}' could not be written: [Errno 122] Disk quota" in log_of(tmp_path)
        assert list((tmp_path / "checkpoints").glob("p*")) == []

    @pytest.mark.slow
    def test_a_death_in_the_writing_thread_is_one_of_the_run(
        self, tmp_path: Path, unbroken: Path
    ) -> None:
        def before(operation: str, path: str) -> None:
            if operation == "fsync" and "p0003" in path:
                raise Died

        with pytest.raises(Died):
            train(tmp_path, hooks={"door": Door(before)})
        assert newest(tmp_path).manifest.state["updates"] == 5
        train(tmp_path)
        assert differences_of_runs(tmp_path, unbroken) == []
        assert leftovers(tmp_path) == []


@pytest.mark.by_default("on_update")
@pytest.mark.parametrize("event", ["on_update", "on_phase_end"])
def test_run_whose_folder_was_taken_over_ends_without_writing(tmp_path: Path, event: str) -> None:
    class Lose(Hook):
        def lose(self, run: Any, *known: Any) -> None:
            if run.state.updates == (7 if event == "on_update" else 10):
                run.folder.lost = "RUN.dir is in use by process 1 on elsewhere"

    setattr(Lose, event, Lose.lose)
    with pytest.raises(FolderInUseError, match="on elsewhere"):
        train(tmp_path, hooks={"lose": Lose()})
    assert newest(tmp_path).manifest.state["updates"] == 5
    assert status(tmp_path)["state"] == "running"  # what the other one wrote, or this one before


class TestSignals:
    def test_a_second_signal_gives_the_save_up_and_leaves_nothing_of_it(
        self, tmp_path: Path, unbroken: Path
    ) -> None:
        def before(operation: str, path: str) -> None:
            if operation == "create" and path.endswith("tensors.safetensors") and "p0002" in path:
                threading.Event().wait(0.15)  # sooner it would be the same request
                os.kill(os.getpid(), signal.SIGTERM)
                while not door.hook._writing.cancelled():
                    threading.Event().wait(0.001)

        door = Door(before)
        first = Steps(
            lambda updates: os.kill(os.getpid(), signal.SIGTERM) if updates == 7 else None
        )
        with pytest.raises(SystemExit) as caught:
            train(tmp_path, hooks={"door": door, "first": first})
        assert caught.value.code == 143
        assert leftovers(tmp_path) == []
        assert (newest(tmp_path).manifest.state["updates"], status(tmp_path)["exit_code"]) == (
            5,
            143,
        )
        assert "the current save was cancelled" in log_of(tmp_path)
        train(tmp_path)
        assert differences_of_runs(tmp_path, unbroken) == []

    @pytest.mark.slow
    def test_signal_waits_for_the_current_save(self, tmp_path: Path, unbroken: Path) -> None:
        def before(operation: str, path: str) -> None:
            if operation == "create" and "p0001" in path:
                threading.Event().wait(0.05)

        first = Steps(
            lambda updates: os.kill(os.getpid(), signal.SIGTERM) if updates == 6 else None
        )
        assert train(tmp_path, hooks={"door": Door(before), "first": first}).exit_code == 143
        assert [saved.name for saved in Checkpointer(f"{tmp_path}/checkpoints", Storage()).list_checkpoints()] == [
            "p0001-s00000000", "p0002-s00000001",
        ]  # fmt: skip
        train(tmp_path)
        assert differences_of_runs(tmp_path, unbroken) == []

    @pytest.mark.by_default("1e-9-5")
    @pytest.mark.parametrize(("grace", "updates"), [("1e-9", 5), ("600", 7)])
    def test_no_save_starts_that_takes_longer_than_the_grace(
        self, tmp_path: Path, grace: str, updates: int
    ) -> None:
        first = Steps(
            lambda updates: os.kill(os.getpid(), signal.SIGTERM) if updates == 7 else None
        )
        result = train(tmp_path, f"CHECKPOINT.grace_seconds={grace}", hooks={"first": first})
        assert (result.exit_code, newest(tmp_path).manifest.state["updates"]) == (143, updates)


class TestWhen:
    def test_checkpoints_are_saved_by_minutes(self, tmp_path: Path) -> None:
        hook = Door(lambda operation, path: None)
        train(tmp_path, "CHECKPOINT.every_minutes=1e-9", "CHECKPOINT.every_epochs=null", "PHASES.epochs=1",
              hooks={"door": hook})  # fmt: skip
        assert hook.hook.saves == 8
        other = Door(lambda operation, path: None)
        train(tmp_path / "rare", "CHECKPOINT.every_minutes=60", "CHECKPOINT.every_epochs=null", "PHASES.epochs=1",
              hooks={"door": other})  # fmt: skip
        assert other.hook.saves == 1

    @pytest.mark.feature(
        "checkpoint.every_minutes",
        "saves by time, from the cost of a save",
        "`CHECKPOINT.every_minutes=auto`",
    )
    @pytest.mark.parametrize(
        ("stall", "between", "words", "seconds"),
        [
            (0.0, DAY, (), 30.0),  # nothing is saved yet: the first save comes soon
            (0.5, DAY, (), 293.9),  # sqrt(2 * 0.5 s * 86,400 s)
            (9.0, DAY, (), 600.0),
            (0.5, 3600.0, (), 60.0),
            (0.5, DAY, ("CHECKPOINT.every_epochs=null", "CHECKPOINT.at_end=false"), math.inf),
            (0.5, DAY, ("CHECKPOINT.every_minutes=null",), math.inf),
        ],
    )
    def test_interval_follows_the_cost_of_a_save(
        self,
        monkeypatch: pytest.MonkeyPatch,
        stall: float,
        between: float,
        words: tuple[str, ...],
        seconds: float,
    ) -> None:
        monkeypatch.setattr("phasetrain.hooks.checkpoint.time.monotonic", lambda: 0.0)
        setup = resolve_overrides([*SMALL, "RUN.dir=x", *words])
        timer = SaveTimer(setup.config.CHECKPOINT, between)
        timer.add_save(stall=stall)
        timer.add_save(stall=stall)
        assert timer.next_save == pytest.approx(seconds, abs=0.1)

    @pytest.mark.feature("checkpoint.every_minutes")
    def test_run_shorter_than_an_epoch_saves_by_default(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("phasetrain.hooks.checkpoint.SHORTEST_INTERVAL", 1e-9)
        monkeypatch.setattr("phasetrain.hooks.checkpoint.LONGEST_INTERVAL", 1e-9)
        words = ("PHASES.epochs=null", "PHASES.updates=4", "PHASES.limit.train=null")
        run_until_killed(tmp_path, *words, hooks={"kill": KillAfter(3)})
        assert newest(tmp_path).manifest.facts.why == "minutes"
        assert "takes effect" not in (tmp_path / "log.txt").read_text()
        # It changes nothing in the weights when a save happens.
        again = train(tmp_path, *words)
        monkeypatch.undo()
        assert again.digest == train(tmp_path / "unbroken", *words).digest

    def test_attempt_without_a_checkpoint_is_mentioned(self, tmp_path: Path) -> None:
        run_until_killed(tmp_path, hooks={"kill": KillAfter(2)})
        stream = io.StringIO()
        run([*SMALL, f"RUN.dir={tmp_path}"], terminal=Terminal(stream, live=False))
        assert "attempt 1 left no checkpoint: starting from update 0" in stream.getvalue()

    @pytest.mark.by_default("True")
    @pytest.mark.parametrize("asked", [True, False])
    def test_on_an_exception_between_two_steps(
        self, tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
    ) -> None:
        real = Task.batches

        def broken(task: Task, phase: Any, start: int) -> Iterator[Any]:
            for number, batches in enumerate(real(task, phase, start)):
                if phase.epoch == 1 and phase.is_train and number == 2:
                    raise OSError("unreadable")
                yield batches

        with monkeypatch.context() as patched:
            patched.setattr(Task, "batches", broken)
            with pytest.raises(OSError, match="unreadable"):
                train(tmp_path, f"CHECKPOINT.on_exception={str(asked).lower()}")
        loaded = newest(tmp_path)
        assert loaded.manifest.state["updates"] == (7 if asked else 5)
        assert loaded.manifest.facts.why == ("exception" if asked else "epoch")
        train(tmp_path)
        assert differences_of_runs(tmp_path, unbroken) == []

    def test_exception_within_a_step_saves_nothing(self, tmp_path: Path) -> None:
        class Broken(Hook):
            def on_backward(self, run: Any, phase: Any, out: Any) -> None:
                if run.state.updates == 7:
                    raise RuntimeError("planted")

        with pytest.raises(RuntimeError, match="planted"):
            train(tmp_path, hooks={"broken": Broken()})
        assert newest(tmp_path).manifest.state["updates"] == 5

    def test_nothing_is_written_anew_at_the_position_of_a_resume(self, tmp_path: Path) -> None:
        run_until_killed(tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(5)})
        before = sorted((tmp_path / "checkpoints").iterdir())
        run_until_killed(tmp_path, hooks={"kill": KillAfter(0)})
        assert sorted((tmp_path / "checkpoints").iterdir()) == before


class TestBest:
    def test_the_best_is_saved_when_it_was_measured_and_kept(self, tmp_path: Path) -> None:
        values = iter([0.5, 0.9, 0.7, 0.8])

        class Measured(Hook):
            def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
                if phase.split == "test":
                    metrics["accuracy"] = next(values)

        words = (
            "PHASES.epochs=4",
            "CHECKPOINT.best.monitor=test/accuracy",
            "CHECKPOINT.keep_last=2",
            "RUN.exact=false",  # `values` is in no state_dict
        )
        train(tmp_path, *words, hooks={"measured": Measured()})
        listed = Checkpointer(f"{tmp_path}/checkpoints", Storage()).list_checkpoints()
        found = {
            saved.name: (
                saved.manifest.facts.why,
                saved.manifest.facts.metrics.get("test/accuracy"),
            )
            for saved in listed
        }
        assert found == {
            "p0004-s00000000": ("best", 0.9), "p0007-s00000000": ("epoch", None), "p0008-s00000000": ("end", 0.8),
        }  # fmt: skip

    def test_weights_that_were_not_tested_have_no_metrics(self, tmp_path: Path) -> None:
        train(tmp_path, "CHECKPOINT.every_updates=7", "CHECKPOINT.keep_last=9")
        listed = Checkpointer(f"{tmp_path}/checkpoints", Storage()).list_checkpoints()
        within = [one.manifest.facts.metrics for one in listed if one.manifest.state["step"]]
        assert within == [{}, {}]

    def test_an_unknown_monitor_is_refused_before_the_first_step(self, tmp_path: Path) -> None:
        steps: list[int] = []
        with raises(
            ConfigError,
            key="CHECKPOINT.best.monitor",
            given="'-test/accurracy'",
            suggestion="test/accuracy",
        ):
            train(
                tmp_path,
                "CHECKPOINT.best.monitor=-test/accurracy",
                hooks={"steps": Steps(steps.append)},
            )
        assert steps == []
