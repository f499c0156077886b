"""The phase engine: the one loop that interleaves train and test phases."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Generic
from weakref import WeakSet

from typing_extensions import TypeVar

from phasetrain.config.attrdict import AttrDict
from phasetrain.distributed import Consensus, World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.interleave import add_last_tests
from phasetrain.engine.plan import Phase, Plan, Stage
from phasetrain.engine.position import COMPLETED, Position, RunState
from phasetrain.errors import ConfigError
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.history import Best
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.signals import Interrupted, reject_exit

# `phasetrain.tasks.Task` and `phasetrain.hooks.Hooks`, which the engine must not import.
TaskType = TypeVar("TaskType", bound=Any, default=Any)
HooksType = TypeVar("HooksType", bound=Any, default=Any)


class PhaseEngine(Generic[TaskType, HooksType]):
    """Runs the phases of a plan, starting at any position.

    Args:
        task: computes train and test steps.
        plan: all phases of the run.
        state: position to start from; advanced as steps and phases complete.
        hooks: hooks to call; `phasetrain.hooks.base` lists the events.
        folder: run folder that hooks write to.
        world: ranks of the run.
        clock: adds up how the wall time is spent.

    Attributes:
        config: the frozen config of the run.
        best: best value of the monitored metric until now; a hook sets it.
        stages: stages of the run, with the test splits of each. A run that is stopped for good is
            tested like one whose plan ends there; without stages it ends at once.
        completes_first_steps: whether a phase that has begun is left after its first step at the
            earliest, because hooks act in `on_phase_start` and would act again in a resume.
        pause_at: update after which the run pauses, with the tests that follow it; None: never.
        is_phase_begun: whether a phase has begun whose first step must be completed, and is not;
            nothing may be saved then.
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
        self.config: AttrDict = task.parts.config
        self.plan = plan
        self.state = state
        self.stages: Sequence[Stage] = ()
        self.folder = folder
        self.world = world or World()
        self.clock = clock or Clock()
        self.hooks = hooks
        self.consensus = Consensus(self.world)
        self.resumed_from = ""
        self.best: Best | None = None
        self.completes_first_steps = False
        self.is_phase_begun = False
        self.pause_at: int | None = None
        self._events: Any = None
        self._out: StepOutput | None = None
        # Weak: a generator that the caller has dropped is closed by Python itself.
        self._open: WeakSet[Generator[list[Batch], None, None]] = WeakSet()

    def run(self) -> RunState:
        """Run the rest of the plan and return the position reached."""
        with self._session():
            for batches in self._train_steps():
                self.finish(self.compute(batches))
        return self.state

    def steps(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each train step, for a custom training loop.

        The caller computes the update and passes the result to `finish`; tests, hooks and
        checkpoints run between two batches. Leaving the loop right after `finish` saves the
        position; leaving it anywhere else rolls the run back to its last checkpoint.

        Example:
            >>> for batches in engine.steps():
            ...     engine.finish(engine.compute(batches))
        """

        def generate() -> Generator[list[Batch], None, None]:
            with self._session():
                yield from self._train_steps()

        steps = generate()
        self._open.add(steps)
        return steps

    def compute(self, batches: list[Batch]) -> StepOutput:
        """Run the task's step on the micro-batches of the current step."""
        out: StepOutput = self.task.run_step(batches, self.position(), self._events)
        return out

    def finish(self, out: StepOutput) -> None:
        """Set the output of the current step; call it before the next batch is requested."""
        self._out = out

    def close(self) -> None:
        """Close every loop over `steps` that is still open."""
        for steps in list(self._open):
            steps.close()

    def stop(self, reason: str, *, interrupted: bool = False) -> None:
        """Stop at the next step boundary: to be resumed if `interrupted`, else for good.

        Only the first reason counts. Before a run ends for good, each split that was not tested
        since the last update is tested.
        """
        self.consensus.ask_stop(reason, interrupted=interrupted)

    @property
    def is_best(self) -> bool:
        """Whether `best` was measured with the current weights."""
        return self.best is not None and self.best.updates == self.state.updates

    @property
    def stopping(self) -> str:
        """Why the run stops, or empty."""
        return self.consensus.stopping or self.consensus.ending

    def position(self) -> Position:
        """Return the position of the current step."""
        return self.plan.position(self.state)

    def events(self) -> Any:
        """Return the events of the current phase, for `Task.train_step`."""
        return self._events

    def run_phase(self, phase: Phase) -> Iterator[list[Batch]]:
        """Run the rest of a phase; the caller computes each train step that is yielded."""
        task = self.task
        state = self.state
        clock = self.clock
        self._events = self.hooks.events(self, phase)
        # The task first: hooks may look at the mode of the model and at reset meters.
        task.begin(phase, fresh=state.step == 0)
        self.is_phase_begun = self.completes_first_steps and state.step == 0
        self.hooks.call("on_phase_start", self, phase)
        try:
            self._begin_epoch(phase)
            clock.switch_to("data")
            steps = iter(task.batches(phase, state.step))  # starts reading at this step
            while True:
                if state.step < phase.steps:
                    self.hooks.call("on_step_start", self, phase)
                batches = next(steps, None)
                if batches is None:
                    self._check_complete(phase)
                    break
                clock.step(state.updates, is_train=phase.is_train)
                self._out = None
                if phase.is_train and batches:
                    yield batches  # the caller computes the update, and calls `finish`
                else:
                    self.finish(self.compute(batches))
                self._complete_step(phase)
                clock.switch_to("data")
                pause = "" if self.pause_at is None else self._find_pause(phase)
                if self.consensus.agree(pause=pause):
                    if not self._begin_ending():
                        return
                    if phase.is_train:
                        phase = self.plan.phases[state.phase]  # it ends here
                        break
            clock.switch_to("train" if phase.is_train else "test")
        except Interrupted as signal:  # raised only while the loader waits for a batch
            self.stop(str(signal), interrupted=True)
            return
        metrics = task.measure(phase)
        # Counted before the hooks, as with steps: a checkpoint made by one of them must not repeat
        # the phase.
        state.finish_phase()
        self.hooks.call("on_metrics", self, phase, metrics)
        self.hooks.call("on_phase_end", self, phase, metrics)
        # All ranks wait here: whether the run stops must be agreed before any of them begins a
        # phase whose collectives the others would miss.
        if self.consensus.agree(wait=True):
            self._begin_ending()

    def _check_complete(self, phase: Phase) -> None:
        # The rest of the plan would run at positions that no update has reached.
        if self.state.step != phase.steps:
            raise ConfigError(
                f"TASK.name: {type(self.task).__name__}.batches ends a {phase.split} phase after "
                f"{self.state.step} of {phase.steps} steps; yield the micro-batches of every step",
                code="task.wrong_steps",
            )

    def _complete_step(self, phase: Phase) -> None:
        self.state.finish_step(phase)  # before the hooks, so that they only save complete steps
        self.is_phase_begun = False
        if self._out is None:
            raise RuntimeError(
                f"step {self.state.step}: call engine.finish(out) before requesting the next batch"
            )
        self.hooks.call("on_step", self, phase, self._out)

    def _begin_epoch(self, phase: Phase) -> None:
        if phase.is_train and phase.first == 0 and self.state.step == 0:
            self.task.begin_epoch(phase)

    def _begin_ending(self) -> bool:
        """Return whether a run that stops has tests left, and put them next in the plan."""
        consensus = self.consensus
        if consensus.interrupted or not self.stages:
            return False
        consensus.begin_ending()
        plan = add_last_tests(self.plan, self.state, self.stages)
        if plan is not self.plan:
            self.plan = plan
            self.task.replan(plan)
        return True

    def _train_steps(self) -> Iterator[list[Batch]]:
        if self.stopping:  # the checkpoint was saved between the stop and the tests
            self._begin_ending()
        while self._has_phases_left():
            phase = self.plan.phases[self.state.phase]
            # Here as well as between two steps: the next update may be the first one of a phase.
            if pause := self._find_pause(phase):
                self.consensus.pause(pause)
                return
            yield from self.run_phase(phase)

    def _find_pause(self, phase: Phase) -> str:
        """Return why the run pauses before the next step of a phase, or an empty string."""
        state = self.state
        if self.pause_at is None or state.updates < self.pause_at or self.consensus.ending:
            return ""
        # Every rank counts the updates, so all of them pause together.
        if phase.is_train and state.step < phase.steps:
            return f"RUN.pause_at = {self.pause_at}"
        return ""

    def _has_phases_left(self) -> bool:
        state = self.state
        if state.phase == len(self.plan.phases) or state.finished or self.consensus.stopping:
            return False
        phase = self.plan.phases[state.phase]
        # A train phase without a step left was cut by the stop, and has not been measured.
        return not self.consensus.ending or not phase.is_train or state.step == phase.steps

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Call the hooks at the start and at the end of the run, whichever way it ends."""
        try:
            with reject_exit():
                self.hooks.start(self)
                if self.resumed_from:
                    self.hooks.call("on_load", self)
                yield
                # Before `on_end`: the last checkpoint says that nothing is left to resume.
                if not self.consensus.interrupted and not self.state.finished:
                    self.state.finished = self.stopping or COMPLETED
                self.clock.switch_to("end")
                self.task.model = self.task.parts.model  # a test of averages has another one
                self.hooks.call("on_end", self)
        except GeneratorExit as error:  # the caller left its loop over `steps`
            self._leave_loop(error)
            raise
        except BaseException as error:
            self.hooks.on_exception(self, error)
            raise
        finally:
            # Workers are stopped even if closing a hook fails.
            with closing(self.task):
                self.hooks.close()

    def _leave_loop(self, error: GeneratorExit) -> None:
        self.consensus.stopping = "the loop was left"
        self.consensus.interrupted = True
        if self._out is None:
            # The step may be half done: whether the weights contain its update is unknown, so
            # nothing may be saved here.
            self.hooks.on_exception(self, error)
            return
        self._complete_step(self.plan.phases[self.state.phase])
        self.hooks.call("on_end", self)
