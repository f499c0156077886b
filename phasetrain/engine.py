"""The phase engine: the one loop that interleaves train and test phases."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from weakref import WeakSet

from phasetrain.batch import Batch, StepOutput, finished
from phasetrain.clock import Clock
from phasetrain.distributed import Consensus, World
from phasetrain.folder import RunFolder
from phasetrain.hooks.base import Hook, Hooks, PhaseEvents
from phasetrain.plan import Phase, Plan
from phasetrain.signals import Interrupted
from phasetrain.state import RunState
from phasetrain.tasks import Position, Task


class PhaseEngine:
    """Runs the phases of a plan from a position on.

    Args:
        task: what is learned.
        plan: every phase.
        state: the position to start from; moved forward as steps and phases complete.
        hooks: label -> hook; see `phasetrain.hooks.base` for the events.
        folder, world, clock: where hooks write, the processes, and what adds up where the time goes.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        state: RunState,
        hooks: Mapping[str, Hook] | None = None,
        *,
        folder: RunFolder | None = None,
        world: World | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.task, self.plan, self.state = task, plan, state
        self.folder, self.world, self.clock = folder, world or World(), clock or Clock()
        self.hooks, self.consensus, self.resumed_from = Hooks(hooks or {}, self.world), Consensus(self.world), ""
        self._out: StepOutput | None = None
        self._open: WeakSet[Generator[list[Batch], None, None]] = WeakSet()

    def run(self) -> RunState:
        """Run what is left of the plan and return the position reached."""
        deque(self._train_batches(own_loop=False), maxlen=0)
        return self.state

    def steps(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each train step, for a loop of one's own.

        The caller computes, updates and hands the result over with `finish`; all else happens between two batches. A
        loop left after `finish` is saved there; left anywhere else, it goes back to its last checkpoint.

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
        """Stop at the next step boundary: for now if `interrupted`, else for good; the first reason stands."""
        self.consensus.ask_stop(reason, interrupted=interrupted)

    @property
    def stopping(self) -> str:
        """Why the run stops, or empty."""
        return self.consensus.stopping

    def run_phase(self, phase: Phase, *, own_loop: bool = False) -> Iterator[list[Batch]]:
        """Run what is left of a phase; with `own_loop`, its train batches are yielded instead of computed."""
        task, state, clock, events = self.task, self.state, self.clock, PhaseEvents(self, phase)
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
        self.consensus.stopping, self.consensus.interrupted = "the loop was left", True
        if self._out is None:  # perhaps in the midst of a step: whether the weights have its update is unknown
            self.hooks.on_exception(self, error)
        else:
            self.state.finish_step(phase := self.plan.phases[self.state.phase])
            self.hooks.on_step(self, phase, self._out)
            self.hooks.on_end(self)

    def position(self) -> Position:
        """Return where the step under way stands."""
        state, phase = self.state, self.plan.phases[self.state.phase]
        return Position(phase.split, state.updates, phase.first + state.step, *self.plan.at(state))

    def events(self) -> PhaseEvents:
        """Return the events of the phase under way, for `Task.train_step`."""
        return PhaseEvents(self, self.plan.phases[self.state.phase])

    def _train_batches(self, *, own_loop: bool) -> Generator[list[Batch], None, None]:
        try:
            self.hooks.on_start(self)
            if self.resumed_from:
                self.hooks.on_load(self)
            while self.state.phase < len(self.plan.phases) and not self.stopping and not self.state.finished:
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
