"""One attempt of a certified run, in a separate process: it records a trace, and saves and dies
where its order says so.

    python -m phasetrain.addons.experiments.certify.attempt ORDER.json
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from phasetrain.app.engines import run_engine
from phasetrain.app.shorten import steps_before
from phasetrain.app.train.training import Loop
from phasetrain.config.addons import find_service
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import RunState
from phasetrain.errors import PhasetrainError
from phasetrain.hooks import CheckpointHook, Hook, Run
from phasetrain.hooks.hidden_state import NOT_WATCHED
from phasetrain.hooks.trace import TraceHook
from phasetrain.proof.held import Held
from phasetrain.proof.positions import PhaseLabel, StepPosition
from phasetrain.proof.trace import Digests, Trace

KillMoment = Literal["step", "saving", "saved"]

FAILED = "failed: "
"""Begins the line with the error of an attempt in its output."""


@dataclass(frozen=True)
class Order:
    """The task of an attempt.

    Attributes:
        overrides: the run.
        config_dir: folder with custom configs.
        trace: path of the trace, without the rank and the suffix; empty: none is recorded.
        saves: numbers of train and test steps of the whole run after which to save.
        kill_step: number of steps after which it is killed; 0: it is not.
        kill_moment: `step`: after that step, and after a step that is not in the checkpoint if
            there are `saves`; `saving`: within the first save after that step, before it is
            committed; `saved`: right after it is committed.
        timing: path of the file with the step times; empty: the run is not timed.
        updates: number of updates of a run that is only timed, with and without deterministic
            kernels in turn; 0: not such a run.
    """

    overrides: tuple[str, ...]
    config_dir: str | None = None
    trace: str = ""
    saves: tuple[int, ...] = ()
    kill_step: int = 0
    kill_moment: KillMoment = "step"
    timing: str = ""
    updates: int = 0

    def write(self, path: Path) -> None:
        """Write the order to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> "Order":
        """Read an order from a file."""
        content = json.loads(Path(path).read_bytes())
        # JSON has no tuples, which a frozen order needs.
        return cls(
            **content | {key: tuple(content[key]) for key in ("overrides", "saves")},
        )


class TraceFile(Trace):
    """Writes the trace to a file step by step: a killed process leaves all steps before the kill.

    Args:
        path: path of the file without the rank.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._rank = 0

    def begin(self, phases: Sequence[PhaseLabel], rank: int = 0) -> None:
        """Write the phases."""
        super().begin(phases, rank)
        self._rank = rank
        self.write({"phases": [list(vars(phase).values()) for phase in phases]})

    def keep_restored(self, position: StepPosition, state: Digests) -> None:
        """Write the digests of a restored state."""
        super().keep_restored(position, state)
        self.write({"restored": position, "digests": state})

    def keep_step(self, position: StepPosition, step: Digests) -> None:
        """Write the digests at a position."""
        super().keep_step(position, step)
        self.write({"position": position, "digests": step})

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        # Opened for each line, so that nothing waits in a buffer that SIGKILL would drop.
        with open(f"{self._path}-{self._rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class ReadTrace:
    """A trace file.

    Attributes:
        trace: its digests.
        killed: number of steps after which the attempt has killed itself; 0: it has not.
        lost: sentences about values that no checkpoint contains.
        unchanged: values that have not changed, and may later.
    """

    trace: Trace
    killed: int = 0
    lost: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


def read_trace(path: str, rank: int) -> ReadTrace:
    """Read the trace of a rank; it is empty if the attempt did not begin."""
    read = ReadTrace(Trace())
    file = Path(f"{path}-{rank}.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for text in lines:
        line = json.loads(text)
        if "phases" in line:
            read.trace.begin([PhaseLabel(*phase) for phase in line["phases"]])
        elif "restored" in line:
            read.trace.restored = tuple(line["restored"]), line["digests"]
        elif "position" in line:
            read.trace.steps[tuple(line["position"])] = line["digests"]
        elif "lost" in line:
            read.lost, read.unchanged = tuple(line["lost"]), tuple(line["unchanged"])
        else:
            read.killed = line["killed"]
    return read


class SaveAndKill(Hook):
    """Requests saves, and kills the process group at a moment.

    Args:
        order: says when.
        trace: gets a line before the kill.
    """

    observe_only = True

    def __init__(self, order: Order, trace: TraceFile) -> None:
        self._order = order
        self._trace = trace
        self._steps = 0
        self._saved = 0
        self._is_armed = False

    def on_start(self, run: Run) -> None:
        """Watch renames: one commits the checkpoint."""
        if self._order.kill_step and self._order.kill_moment == "saving":
            sys.addaudithook(self._kill_before_rename)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Request a save after a step, or kill the run before the save."""
        self._steps = steps_before(run.plan, phase.index) + run.state.step
        order = self._order
        is_due = order.kill_step and self._steps >= order.kill_step
        # Several ranks agree on a save, which takes a step or two.
        is_saved = not order.saves or 0 < self._saved < self._steps
        if is_due and is_saved and order.kill_moment == "step":
            self._kill()
        # As SIGUSR1 would: the checkpoint hook, which is called later, saves after this step.
        if self._steps in order.saves:
            checkpoint = run.hooks.by_label["checkpoint"]
            assert isinstance(checkpoint, CheckpointHook)
            checkpoint.signals.save = True

    def on_save(self, run: Run) -> None:
        """Arm the kill within this save."""
        if self._order.kill_moment == "saving":
            self._is_armed = bool(self._order.kill_step) and self._steps >= self._order.kill_step

    def on_saved(self, run: Run) -> None:
        """Kill the run right after this save."""
        order = self._order
        self._saved = self._steps
        if order.kill_step and order.kill_moment == "saved" and self._steps >= order.kill_step:
            self._kill()

    def _kill_before_rename(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Working folders of checkpoints are `.../checkpoints/NAME.tmp-...` until they are renamed.
        if self._is_armed and event == "os.rename" and "/checkpoints/p" in str(arguments[0]):
            self._kill()

    def _kill(self) -> None:
        self._trace.write({"killed": self._steps})
        # The whole group, as on a preempted machine: loader workers and the other ranks as well.
        os.killpg(0, signal.SIGKILL)


class HeldValues(Hook):
    """Finds values that no checkpoint contains, and those that have not changed and may later.

    Args:
        trace: gets a line at the end.
    """

    observe_only = True
    main_only = False  # the ranks compare together

    def __init__(self, trace: TraceFile) -> None:
        self._trace = trace
        watch = find_service("watch_held_state")
        self._watch = None if watch is None else watch(self._accept)
        self._first: Mapping[str, Held] = {}
        self._lost: list[str] = []

    def on_step_start(self, run: Run, phase: Phase) -> None:
        """Keep the values before the first step."""
        if self._watch is not None:
            self._watch.begin_phase(run, phase)
            self._first = self._first or self._watch.state.read()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Compare the values after the first steps."""
        if self._watch is not None:
            self._watch.end_step()

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Compare the values with the start of the phase."""
        if self._watch is not None:
            self._watch.check(run)

    def on_end(self, run: Run) -> None:
        """Write the findings."""
        if self._watch is None:
            self._trace.write({"lost": [], "unchanged": [NOT_WATCHED]})
        elif state := self._watch.state:
            unchanged = state.list_unchanged(self._first)
            self._trace.write({"lost": self._lost, "unchanged": unchanged})

    def _accept(self, lines: dict[str, list[str]], updates: int) -> bool:
        self._lost += lines
        return True


class Timing(Hook):
    """Measures train steps from their batch to their end, with the device.

    Attributes:
        seconds: of each step.
    """

    observe_only = True

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began: float | None = None

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Start the clock with the first micro-batch."""
        if self._began is None:
            _wait_for_device(run)
            self._began = time.perf_counter()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Stop the clock."""
        _wait_for_device(run)
        # Tests are not counted: deterministic kernels cost most in the backward pass.
        if phase.is_train and self._began is not None:
            self.seconds.append(time.perf_counter() - self._began)
        self._began = None


def _wait_for_device(run: Run) -> None:
    # A step on CUDA has only been queued when its call returns.
    if run.task.parts.machine.device.type == "cuda":
        torch.cuda.synchronize(run.task.parts.machine.device)


def is_deterministic_step(number: int) -> bool:
    """Return whether a step of a timed run is deterministic: yes, no, no, yes, and so on."""
    # A slow drift of the machine then adds as much to one kind as to the other.
    return number % 4 in (0, 3)


def _train_alternately(engine: PhaseEngine, updates: int) -> RunState:
    """Train with and without deterministic kernels in turn, and stop after some updates."""
    for number, batches in enumerate(engine.steps()):
        # Between two steps: autograd and cuDNN read the setting whenever they choose a kernel.
        torch.use_deterministic_algorithms(is_deterministic_step(number))
        engine.finish(engine.compute(batches))
        if number + 1 >= updates:
            engine.stop("all steps are measured")
    return engine.state


def run_order(order: Order) -> int:
    """Run an attempt and return its exit code."""
    hooks: dict[str, Hook] = {}
    if order.trace:
        trace = TraceFile(order.trace)
        # The last one is called first after a step: the trace has the step before the kill.
        hooks = {"certify_kill": SaveAndKill(order, trace), "certify_trace": TraceHook(trace)}
        if not order.kill_step:
            hooks["certify_held"] = HeldValues(trace)
    timing = Timing()
    if order.timing:
        hooks["certify_timing"] = timing
    # The engine of the command line: an attempt is a run like any other, plus three hooks.
    result = run_engine(
        order.overrides, config_dir=order.config_dir, hooks=hooks, loop=_choose_loop(order)
    )
    if timing.seconds:
        Path(order.timing).write_text(json.dumps(timing.seconds), encoding="utf-8")
    return result.exit_code


def _choose_loop(order: Order) -> Loop:
    if order.updates:
        return partial(_train_alternately, updates=order.updates)
    return PhaseEngine.run


def main(words: Sequence[str]) -> int:
    """Run the order in a file, and print an error as one line."""
    try:
        return run_order(Order.read(words[0]))
    except PhasetrainError as error:
        sys.stderr.write(f"{FAILED}{error}\n")
        return error.exit_code
    except Exception as error:
        # One line for the verdict, and the traceback for the person who looks at the output.
        sys.stderr.write(f"{FAILED}{type(error).__name__}: {error}\n")
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
