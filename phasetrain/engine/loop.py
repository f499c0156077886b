"""The phase engine: the one loop that interleaves train and test phases."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Generic, Protocol
from weakref import WeakSet

from typing_extensions import TypeVar

from phasetrain.distributed import Consensus, World
from phasetrain.engine.batch import Batch, StepOutput, finished
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import Position, RunState
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.signals import Interrupted


class PhaseTask(Protocol):
    """A task as the engine uses it; see `phasetrain.tasks.Task`."""

    def begin(self, phase: Phase, *, fresh: bool) -> None:
        """Prepare for a phase; `fresh` if none of its steps is complete."""
        ...

    def batches(self, phase: Phase, start: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step of a phase, from step `start` on."""
        ...

    def train_step(self, batches: list[Batch], at: Position, events: Any) -> StepOutput:
        """Make one update from the micro-batches of a step."""
        ...

    def test_step(self, batches: list[Batch], at: Position, events: Any) -> StepOutput:
        """Evaluate the micro-batches of a step."""
        ...

    def measure(self, phase: Phase) -> dict[str, float]:
        """Return the metrics of a phase by label."""
        ...

    def close(self) -> None:
        """Release what the task holds."""
        ...


class EngineHooks(Protocol):
    """The hooks of a run as the engine calls them; see `phasetrain.hooks.Hooks`."""

    def events(self, run: Any, phase: Phase) -> Any:
        """Return the events within the steps of a phase."""
        ...

    def on_start(self, run: Any) -> None:
        """Call the hooks at the start of the run."""
        ...

    def on_load(self, run: Any) -> None:
        """Call the hooks after a checkpoint was restored."""
        ...

    def on_phase_start(self, run: Any, phase: Phase) -> None:
        """Call the hooks at the start of a phase."""
        ...

    def on_step(self, run: Any, phase: Phase, out: StepOutput) -> None:
        """Call the hooks after a complete step."""
        ...

    def on_phase_end(self, run: Any, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Call the hooks after a complete phase."""
        ...

    def on_end(self, run: Any) -> None:
        """Call the hooks at the end of the run."""
        ...

    def on_exception(self, run: Any, error: BaseException) -> None:
        """Call the hooks after an exception."""
        ...

    def close(self) -> None:
        """Release what the hooks hold."""
        ...


TaskType = TypeVar("TaskType", bound=PhaseTask, default=Any)
HooksType = TypeVar("HooksType", bound=EngineHooks, default=Any)


class PhaseEngine(Generic[TaskType, HooksType]):
    """Runs the phases of a plan from a position on.

    Args:
        task: what is learned.
        plan: every phase.
        state: the position to start from; moved forward as steps and phases complete.
        hooks: the hooks to call; see `phasetrain.hooks.base` for the events.
        folder, world, clock: where hooks write, the processes, and what adds up where the time
            goes.
    """

    def __init__(
        self,
        task: TaskType,
        plan: Plan,
        state: RunState,
        hooks: HooksType,
        *,
        folder: RunFolder | None = None,
        world: World | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.task = task
        self.plan = plan
        self.state = state
        self.folder = folder
        self.world = world or World()
        self.clock = clock or Clock()
        self.hooks = hooks
        self.consensus = Consensus(self.world)
        self.resumed_from = ""
        self._out: StepOutput | None = None
        self._open: WeakSet[Generator[list[Batch], None, None]] = WeakSet()

    def run(self) -> RunState:
        """Run what is left of the plan and return the position reached."""
        deque(self._train_batches(own_loop=False), maxlen=0)
        return self.state

    def steps(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each train step, for a loop of one's own.

        The caller computes, updates and hands the result over with `finish`; all else happens
        between two batches. A loop left after `finish` is saved there; left anywhere else, it goes
        back to its last checkpoint.

        Example:
            >>> for batches in engine.steps():
            ...     engine.finish(task.train_step(batches, engine.position(), engine.events()))
        """
        self._open.add(steps := self._train_batches(own_loop=True))
        return steps

    def close(self) -> None:
        """Leave a loop over `steps` that somebody still holds open."""
        for steps in list(self._open):
            steps.close()

    def finish(self, out: StepOutput) -> None:
        """Hand over the output of the step under way, before the next batch is asked for."""
        self._out = out

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Stop at the next step boundary: for now if `interrupted`, else for good; the first reason
        stands."""
        self.consensus.ask_stop(reason, interrupted=interrupted)

    @property
    def stopping(self) -> str:
        """Why the run stops, or empty."""
        return self.consensus.stopping

    def run_phase(self, phase: Phase, *, own_loop: bool = False) -> Iterator[list[Batch]]:
        """Run what is left of a phase; with `own_loop`, its train batches are yielded instead of
        computed."""
        task = self.task
        state = self.state
        clock = self.clock
        events = self.hooks.events(self, phase)
        task.begin(phase, fresh=state.step == 0)
        self.hooks.on_phase_start(self, phase)
        try:
            clock.turn("data")
            for batches in task.batches(phase, state.step):  # the sampler's start iteration
                clock.step(state.updates, is_train=phase.is_train)
                self._out = None
                if own_loop and phase.is_train:
                    yield batches
                else:
                    compute = task.train_step if phase.is_train else task.test_step
                    self._out = compute(batches, self.position(), events)
                state.finish_step(phase)
                self.hooks.on_step(self, phase, finished(self._out))
                clock.turn("data")
                if self.consensus.turn():
                    return
            clock.turn("train" if phase.is_train else "test")
        except Interrupted as asked:  # while it waited for a batch
            self.stop(str(asked), interrupted=True)
            return
        metrics = task.measure(phase)
        state.finish_phase()
        self.hooks.on_phase_end(self, phase, metrics)
        self.consensus.turn(wait=True)

    def _leave(self, error: GeneratorExit) -> None:
        self.consensus.stopping = "the loop was left"
        self.consensus.interrupted = True
        if (
            self._out is None
        ):  # perhaps in the midst of a step: whether the weights have its update is unknown
            self.hooks.on_exception(self, error)
        else:
            self.state.finish_step(phase := self.plan.phases[self.state.phase])
            self.hooks.on_step(self, phase, self._out)
            self.hooks.on_end(self)

    def position(self) -> Position:
        """Return where the step under way stands."""
        state = self.state
        phase = self.plan.phases[self.state.phase]
        return Position(phase.split, state.updates, phase.first + state.step, *self.plan.at(state))

    def events(self) -> Any:
        """Return the events of the current phase, for `Task.train_step`."""
        return self.hooks.events(self, self.plan.phases[self.state.phase])

    def _train_batches(self, *, own_loop: bool) -> Generator[list[Batch], None, None]:
        try:
            self.hooks.on_start(self)
            if self.resumed_from:
                self.hooks.on_load(self)
            while (
                self.state.phase < len(self.plan.phases)
                and not self.stopping
                and not self.state.finished
            ):
                yield from self.run_phase(self.plan.phases[self.state.phase], own_loop=own_loop)
            if not self.consensus.interrupted and not self.state.finished:
                self.state.finished = self.stopping or "completed"
            self.clock.turn("end")
            self.hooks.on_end(self)
        except GeneratorExit as error:  # the loop over `steps` was left
            self._leave(error)
            raise
        except BaseException as error:
            self.hooks.on_exception(self, error)
            raise
        finally:
            with closing(self.task):
                self.hooks.close()
