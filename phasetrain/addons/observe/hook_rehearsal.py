"""The rehearsal of custom hooks: their events are called once before the first step.

It runs in a forked copy of the process, so that nothing of it stays: neither in the hooks, nor in
the objects and modules that they use, nor in the run. The copy may write to a scratch folder only.
"""

import dis
import json
import logging
import os
import select
import signal
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial, wraps
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch

from phasetrain.addons.observe.start_values import (
    LABEL,
    OPENING,
    StartValues,
    list_weights,
)
from phasetrain.app.preflight.resume_proof import read_here
from phasetrain.app.setup import Setup
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase, PhaseTable, Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, Problem, is_user_file, list_user_frames
from phasetrain.hooks import Hook, Hooks
from phasetrain.hooks.base import overrides
from phasetrain.hooks.dispatch import EVENTS, STREAMS, call_seeded
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.child_processes import stop_with_parent
from phasetrain.tasks import SavedTask, Task

log = logging.getLogger(__name__)

LIMIT_SECONDS = 20.0
"""The rehearsal is given up after this time."""

CODE = "hook.rehearsal"
"""Code of the error that a hook fails."""

EFFECTS = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "shutil.copyfile", "shutil.move", "shutil.rmtree"),
)
"""Audit events of the file system; their first argument is a path."""

FORBIDDEN = (
    *("os.exec", "os.fork", "os.forkpty", "os.kill", "os.posix_spawn", "os.system"),
    *("signal.pthread_kill", "socket.connect", "socket.sendto", "sqlite3.connect"),
    "subprocess.Popen",
)
"""Audit events of effects outside of the process."""

STATE = "state.pt"
"""File with the state after the train step of the rehearsal."""

OTHER_WEIGHTS = 1.01
"""Factor by which the second resume of a rehearsal has other weights."""

REPEATED = ("on_step", "on_phase_end")
"""Events that are also called at update 0, which is a multiple of every interval."""


class HookFailure(NamedTuple):
    """An error of a hook.

    Attributes:
        label: label of the hook.
        event: name of the event, or `close`.
        error: type and message.
        frames: lines of user code that led to it.
    """

    label: str
    event: str
    error: str
    frames: tuple[str, ...]


class ForbiddenEffectError(PermissionError):
    """A hook would change something outside of the rehearsal."""


def rehearse_hooks(
    engine: PhaseEngine[Task, Hooks], setup: Setup, values: StartValues | None = None
) -> None:
    """Call the events of custom hooks once, in a copy of the process, and resume in another copy.

    Hooks that send the run elsewhere (`reports_elsewhere`) are left out. Runs on a GPU or with
    several ranks have no rehearsal of hooks, because their processes cannot be copied.

    Args:
        engine: the run, before its first step.
        setup: its config.
        values: compares the values that hooks set in the copies; None: they set none.

    Raises:
        ConfigError: a hook fails, and its errors end a run (code `hook.rehearsal`), or hooks set
            something else in a resume (code `resume.not_exact`).
    """
    hooks = {
        label: hook
        for label, hook in engine.hooks.by_label.items()
        if not type(hook).__module__.startswith("phasetrain.") and not hook.reports_elsewhere
    }
    if (
        not hooks
        or not setup.config.RUN.rehearse
        or not setup.world.is_single_process
        or setup.machine.device.type != "cpu"
        or sys.platform != "linux"
    ):
        return
    problems = []
    different: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="phasetrain-rehearsal-") as scratch:
        try:
            rows = _run_in_copy(lambda: _call_events(engine, hooks, scratch), scratch)
            failures = [HookFailure(*row) for row in rows]
            # At the start of the next train phase, and in the middle of the first one.
            for position in ((1, 0), (0, 1)) if values and not failures else ():
                at = partial(_resume, engine, hooks, scratch, *position)
                different |= dict(_run_in_copy(at, scratch))
        except (OSError, ValueError) as error:  # no memory for a copy, no room for its folder
            log.info("the hooks are not rehearsed: %s", error)
            return
    if values and different:
        values.accept(different)
    for failure in failures:
        hook = hooks[failure.label]
        line = (
            f"HOOKS.{failure.label}: {failure.event} of {type(hook).__name__} fails in the "
            f"rehearsal, before the first step: {failure.error}; correct the hook, or set "
            "RUN.rehearse=false if it fails in the rehearsal only"
        )
        if hook.policy == "raise":
            key = f"HOOKS.{failure.label}"
            problems.append(Problem.from_message(line, CODE, key, tuple(failure.frames)))
        else:
            log.warning("%s", line)
    if problems:
        text = "\n".join(problem.message for problem in problems)
        raise ConfigError(text, code=CODE, problems=problems)


def _run_in_copy(work: Callable[[], list[Any]], scratch: str) -> list[Any]:
    """Run a function in a forked process, which may write to one folder, and return its result;
    empty if it ends in another way."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, whose locks may be held. The copy writes no log and has a
        # time limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        # Whatever happens, the copy must not return into the code of the run.
        try:
            os.close(reader)
            _silence()
            stop_with_parent()
            _forbid_effects(scratch)
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        if not select.select([pipe], [], [], LIMIT_SECONDS)[0]:
            log.info("the rehearsal of hooks was given up after %g seconds", LIMIT_SECONDS)
            os.kill(process, signal.SIGKILL)
        content = pipe.read()
    with suppress(ChildProcessError):
        os.waitpid(process, 0)
    result: list[Any] = json.loads(content or b"[]")
    return result


def _silence() -> None:
    """Let this process print and log nothing, and end at once when it is interrupted."""
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    logging.disable(logging.CRITICAL)
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def _forbid_effects(scratch: str) -> None:
    """Let this process write to a folder only, and make no connections."""
    sys.dont_write_bytecode = True
    tempfile.tempdir = scratch

    def require_scratch(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - also bytes
            if not name.startswith((f"{scratch}{os.sep}", os.devnull)):
                raise ForbiddenEffectError(f"{name}: a rehearsal writes no files of its own")

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                require_scratch(args[0])
        elif event in EFFECTS:
            require_scratch(args[0])
        elif event in FORBIDDEN:
            raise ForbiddenEffectError(f"{event}: not in a rehearsal")

    # It cannot be removed, and needs not: the process ends with the rehearsal.
    sys.addaudithook(watch)
    save = torch.save

    @wraps(save)
    def save_to_scratch(value: object, file: Any, *args: Any, **options: Any) -> None:
        require_scratch(file)  # torch opens files without an audit event
        save(value, file, *args, **options)

    torch.save = cast(Any, save_to_scratch)


def _call_events(
    engine: PhaseEngine[Task, Hooks], hooks: Mapping[str, Hook], scratch: str
) -> list[HookFailure]:
    """Run a step of each split with some of the hooks of a run, and return their errors."""
    recorder = _prepare_copy(engine, hooks, scratch)
    try:
        engine.hooks.start(engine)
        for phase in engine.plan.phases:
            for batches in engine.run_phase(phase):
                engine.finish(engine.compute(batches))
            if phase.is_train:
                _save_and_load(engine, hooks, recorder, f"{scratch}/{STATE}")
        engine.state.finished = "completed"
        engine.hooks.call("on_end", engine)
        for label, hook in hooks.items():
            recorder.wrap(label, "close", hook.close)()
    # An error outside of hooks is an error of the run, which will report it.
    except Exception as error:  # noqa: BLE001
        log.debug("the rehearsal of hooks has ended: %s", error)
    return recorder.failures


def _prepare_copy(
    engine: PhaseEngine[Task, Hooks], hooks: Mapping[str, Hook], scratch: str
) -> "_Recorder":
    """Let the run call some of its hooks only, in a short plan, without its folder and workers."""
    recorder = _Recorder(engine)
    calls = engine.hooks.calls
    values = cast(StartValues | None, engine.hooks.by_label.get(LABEL))
    for event in EVENTS:
        calls[event] = []
        for label, hook in hooks.items():
            if overrides(hook, event):
                call = recorder.wrap(label, event, attrgetter(event)(hook))
                if event in STREAMS:  # an event of a resume draws the same numbers
                    call = partial(call_seeded, call, label, event)
                if values:
                    call = values.around(label, event.removeprefix("on_"), call)
                calls[event].append(call)
    if values:
        calls["on_phase_start"].append(values.on_phase_start)
    engine.folder = RunFolder(scratch)
    engine.plan = _shorten_plan(engine.plan)
    engine.pause_at = None
    engine.task.replan(engine.plan)
    read_here(engine.task)
    return recorder


def _resume(
    engine: PhaseEngine[Task, Hooks], hooks: Mapping[str, Hook], scratch: str, index: int, step: int
) -> list[tuple[str, list[str]]]:
    """Resume from the state that the rehearsal has stored, and return the values that hooks set
    otherwise.

    Args:
        engine: the run.
        hooks: the hooks that are rehearsed.
        scratch: folder with the state.
        index: number of the phase of the resume.
        step: its step.
    """
    path = f"{scratch}/{STATE}"
    values = engine.hooks.by_label[LABEL]
    assert isinstance(values, StartValues), "the label is reserved"
    if not os.path.exists(path):  # noqa: PTH110 - the rehearsal may have ended early
        return []
    different: dict[str, list[str]] = {}
    values.accept = different.update
    _prepare_copy(engine, hooks, scratch)
    saved = torch.load(path, weights_only=False)  # of this run
    engine.task.restore(SavedTask(saved["task"]))
    if step:
        # The first update may have a learning rate of 0. Zeros stay, as in pruned weights.
        for name, weight in list_weights(engine.task).items():
            if weight.requires_grad:
                values.ignored.add(name)
                weight.detach().mul_(OTHER_WEIGHTS)
    for label, state in saved["hooks"].items():
        if state:
            engine.hooks.by_label[label].load_state_dict(state)
    first = engine.plan.phases[0]
    phase = replace(first, index=index, epoch=first.epoch + index)
    engine.state = RunState(index, step, 1, first.samples)
    engine.resumed_from = path
    engine.hooks.start(engine)
    engine.hooks.call("on_load", engine)
    engine.task.begin(phase, fresh=step == 0)
    engine.hooks.call("on_phase_start", engine, phase)
    return list(different.items())


def _shorten_plan(plan: Plan) -> Plan:
    """Return a plan with one step of training and one of each test split."""
    phases: dict[str, Phase] = {}
    for phase, _ in plan.phases.kinds:
        if phase.steps:
            phases.setdefault(phase.split, replace(phase, steps=1, stage=0))
    ordered = sorted(phases.values(), key=lambda phase: not phase.is_train)
    return Plan(PhaseTable(ordered))


def _save_and_load(
    engine: PhaseEngine[Task, Hooks], hooks: Mapping[str, Hook], recorder: "_Recorder", path: str
) -> None:
    """Call the events of a save and of a resume, and store the state in a file."""
    for event in ("on_save", "on_saved"):
        engine.hooks.call(event, engine)
    values = engine.hooks.by_label.get(LABEL)
    states = {LABEL: values.state_dict()} if values else {}
    for label, hook in hooks.items():
        state = states[label] = recorder.wrap(label, "state_dict", hook.state_dict)()
        if state:
            recorder.wrap(label, "load_state_dict", hook.load_state_dict)(state)
    if values and any(overrides(hook, f"on_{e}") for hook in hooks.values() for e in OPENING):
        torch.save({"task": engine.task.shared_state(), "hooks": states}, path)
    engine.hooks.call("on_load", engine)


class _Recorder:
    """Keeps the errors of hooks.

    Args:
        engine: the run.

    Attributes:
        failures: the errors.
    """

    def __init__(self, engine: PhaseEngine[Task, Hooks]) -> None:
        self._engine = engine
        self.failures: list[HookFailure] = []

    def wrap(self, label: str, event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls an event and raises nothing."""

        @wraps(call)
        def recorded(*args: Any) -> Any:
            attributes = getattr(getattr(call, "__self__", None), "__dict__", {})
            before = _copy_containers(attributes) if event in REPEATED else {}
            result = self._try(label, event, call, args)
            state = self._engine.state
            updates = state.updates
            if event in REPEATED and label not in {failure.label for failure in self.failures}:
                state.updates = 0
                # on_phase_end may have emptied what the hook has collected.
                attributes.update(before)
                self._try(label, event, call, args)
                state.updates = updates
            return result

        return recorded

    def _try(self, label: str, event: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return call(*args)
        # Values of a first batch, and files that only a run has, prove no mistake.
        except (ArithmeticError, MemoryError, OSError):
            pass
        except Exception as error:  # noqa: BLE001 - the run goes on to the next event
            if not _is_raised(error):
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                self.failures.append(HookFailure(label, event, message, list_user_frames(error)))
        return None


def _copy_containers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes, with copies of containers that an event may empty."""
    return {
        name: copy(value) if isinstance(value, list | dict | set | deque) else value
        for name, value in attributes.items()
    }


def _is_raised(error: Exception) -> bool:
    """Return whether a `raise` or `assert` in user code has raised an error: there it depends on
    values, such as a metric that is too low."""
    last = error.__traceback__
    assert last is not None, "the error was raised"
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    is_raise = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and is_user_file(code.co_filename)
