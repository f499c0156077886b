"""Errors in events of custom hooks come before the first step, and a rehearsal leaves no trace."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, on
from phasetrain.hooks.error_policy import OnException
from phasetrain.runs.view import RunView

REHEARSED = ("RUN.rehearse=auto", "PHASES.epochs=1")
CALLS: list[str] = []


def write_outside(run: Any) -> None:
    Path(CALLS[0]).write_text("from a rehearsal")


def save_outside(run: Any) -> None:
    torch.save({}, CALLS[0])


def connect(run: Any) -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=1)


class Failing(Hook):
    """Fails in one event."""

    observe_only = True

    def __init__(self, event: str = "") -> None:
        self.event = event
        self.steps = 0

    def fail_in(self, event: str, value: Any = None) -> None:
        if self.event == event:
            value.no_such_attribute()

    def on_start(self, run: Any) -> None:
        self.fail_in("on_start", run)

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        self.steps += 1
        CALLS.append("on_step")
        sys.stdout.write("in on_step\n")
        Path(run.folder.file("mine.txt")).write_text("mine")
        if run.state.updates % 1000 == 0:
            self.fail_in("on_step", out)

    def on_saved(self, run: Any) -> None:
        self.fail_in("on_saved", run)

    def on_load(self, run: Any) -> None:
        self.fail_in("on_load", run)

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        if not phase.is_train:
            self.fail_in("on_phase_end", metrics["accuracy"])

    def on_end(self, run: Any) -> None:
        self.fail_in("on_end", run.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["step" if self.event == "load_state_dict" else "steps"]

    def close(self) -> None:
        self.fail_in("close", self)


EVENTS = (
    *("on_start", "on_step", "on_saved", "load_state_dict", "on_load", "on_phase_end", "on_end"),
    "close",
)


@pytest.mark.feature(
    "hooks.rehearsal",
    "errors in any event of a custom hook come before the first step",
    "`RUN.rehearse`",
)
@pytest.mark.parametrize("event", EVENTS)
def test_error_of_a_hook_comes_before_the_first_step(tmp_path: Path, event: str) -> None:
    CALLS.clear()
    with raises(ConfigError, key="HOOKS.mine", code="hook.rehearsal") as caught:
        train(tmp_path, *REHEARSED, hooks={"mine": Failing(event)})
    assert f"{event} of Failing" in str(caught.value)
    assert "test_hook_rehearsal.py" in caught.value.problems[0].frames[-1]
    assert CALLS == []
    assert not (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("word", ["RUN.rehearse=auto", "RUN.rehearse=false"])
def test_rehearsal_leaves_no_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], word: str
) -> None:
    CALLS.clear()
    hook = Failing()
    digest = train(tmp_path, "PHASES.epochs=1", word, hooks={"mine": hook}).digest
    assert hook.steps == 7
    assert CALLS == ["on_step"] * 7
    assert capfd.readouterr().out.count("in on_step") == 7
    assert len(RunView(str(tmp_path)).status.digest) == 64
    assert digest == train(tmp_path / "without", "PHASES.epochs=1").digest


@pytest.mark.parametrize("policy", ["ignore", "stop"])
def test_error_that_ends_no_run_is_a_warning(tmp_path: Path, policy: OnException) -> None:
    hook = Failing("on_phase_end")
    hook.policy = policy
    train(tmp_path, *REHEARSED, hooks={"mine": hook})
    log = (tmp_path / "log.txt").read_text()
    assert log.count("HOOKS.mine: on_phase_end of Failing fails in the rehearsal") == 1


@pytest.mark.parametrize("effect", [write_outside, save_outside, connect])
def test_rehearsal_has_no_effect_outside(tmp_path: Path, effect: Callable[[Any], None]) -> None:
    CALLS[:] = [str(tmp_path / "outside")]

    @on("start")
    def act(run: Any) -> None:
        effect(run)

    @on("start")
    def fail(run: Any) -> None:
        assert not Path(CALLS[0]).exists()
        run.no_such_attribute()

    with raises(ConfigError, key="HOOKS.fail", code="hook.rehearsal"):
        train(tmp_path / "run", *REHEARSED, hooks={"act": act, "fail": fail})
    assert not Path(CALLS[0]).exists()


def test_condition_on_values_is_no_mistake(tmp_path: Path) -> None:
    @on("phase_end")
    def judge(run: Any, phase: Any, metrics: Any) -> None:
        assert run.state.updates == 5, "a test after one update is too early"

    assert train(tmp_path, *REHEARSED, hooks={"judge": judge}).updates == 5


class Emptying(Hook):
    """Collects values in each step, and empties them at the end of the phase."""

    observe_only = True

    def __init__(self) -> None:
        self.assigned: list[torch.Tensor] = []
        self.cleared: list[torch.Tensor] = []

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        self.assigned.append(out.ids)
        self.cleared.append(out.ids)

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        assert len(torch.cat(self.assigned)) == len(torch.cat(self.cleared))
        self.assigned = []
        self.cleared.clear()


def test_hook_that_empties_what_it_has_collected_passes(tmp_path: Path) -> None:
    assert train(tmp_path, *REHEARSED, hooks={"mine": Emptying()}).updates == 5


def test_hook_that_waits_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phasetrain.addons.observe import hook_rehearsal

    monkeypatch.setattr(hook_rehearsal, "LIMIT_SECONDS", 0.2)
    waits = [True]

    @on("end")
    def wait(run: Any) -> None:
        import time

        if run.state.updates < 5:
            time.sleep(60)
        waits[0] = False

    train(tmp_path, *REHEARSED, hooks={"wait": wait})
    assert waits == [False]
    assert (
        "the rehearsal of hooks was given up after 0.2 seconds"
        in (tmp_path / "log.txt").read_text()
    )
