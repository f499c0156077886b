"""A visit to a past run: the state just before an update, and moves to other updates."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

from phasetrain.addons.experiments.replay.updates import (
    ReplayStart,
    find_content,
    open_replay,
    read_records,
)
from phasetrain.addons.experiments.travel.past_run import PastRun
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.codec import flatten_state
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, LedgerHook, Run
from phasetrain.hooks.ledger import Content
from phasetrain.hooks.run_state import collect_state, restore
from phasetrain.runs.ledger import COMPONENTS
from phasetrain.runtime.format import format_count
from phasetrain.runtime.nested import list_tensors, map_tensors
from phasetrain.tasks import SavedTask, Task

LABEL = "replayed"
"""Label of the ledger hook of a visit; its state belongs to a temporary file, and is not kept."""

WITHOUT_WEIGHTS = ("meter.", "data.", "logs")
"""Prefixes of the parts of a task that have no weights: they measure or read."""

MAX_LISTED = 12
"""Maximum number of tensors in a text."""


@dataclass(frozen=True)
class TensorChange:
    """How a tensor differs between two states.

    Attributes:
        name: its name in the state of the task, such as `model.head.weight`.
        entries: number of entries that differ.
        size: number of entries.
        largest: largest absolute difference; NaN if one is not finite.
        relative: Euclidean norm of the difference, divided by the norm before.
    """

    name: str
    entries: int
    size: int
    largest: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.entries} of {self.size} entries, at most {self.largest:.3g}, "
            f"relative {self.relative:.3g}"
        )


def limit_verdict(compared: Sequence[str]) -> str:
    """Return which components alone were compared, to follow a verdict; empty for all of them."""
    return "" if tuple(compared) == COMPONENTS else f" in {' and '.join(compared)}"


class Changes(list[TensorChange]):
    """Tensors that differ, the largest relative change first; prints as lines."""

    def __repr__(self) -> str:
        lines = [str(change) for change in self[:MAX_LISTED]]
        if len(self) > MAX_LISTED:
            lines.append(f"and {len(self) - MAX_LISTED} more")
        return "\n".join(lines) or "no tensor differs"


@dataclass(frozen=True)
class StepReport:
    """One update that was trained in a visit.

    Attributes:
        update: its number.
        loss: mean over its samples.
        gradient_norm: Euclidean norm of the gradient before clipping; None if no weight had one.
        lr: learning rate of the first parameter group.
        samples: number of its samples.
        differs: components in which it differs from the ledger; None if there is no record of it.
        compared: components that were compared; of a run of several ranks perhaps not all.
        changed: the tensors of the model that it has changed.
    """

    update: int
    loss: float
    gradient_norm: float | None
    lr: float
    samples: int
    differs: tuple[str, ...] | None
    compared: tuple[str, ...]
    changed: Changes

    def __repr__(self) -> str:
        verdict = "not in the ledger"
        if self.differs is not None:
            verdict = "differs from the ledger in " + ", ".join(self.differs)
            if not self.differs:
                verdict = f"equals the ledger{limit_verdict(self.compared)}"
        norm = "none" if self.gradient_norm is None else f"{self.gradient_norm:.6g}"
        head = f"update {self.update}: loss {self.loss:.6g}, gradient norm {norm}, lr {self.lr:.6g}"
        return f"{head} ({verdict})\n{self.changed!r}"


@dataclass(frozen=True)
class KeptState:
    """The state of the run before an update.

    Attributes:
        start: plan, machine and position; its checkpoint has no tensors.
        state: state of task and hooks, on the CPU.
        size: bytes of its tensors.
    """

    start: ReplayStart
    state: dict[str, Any]
    size: int


class StateCache:
    """States by the number of updates before them; the least recently used is dropped first.

    Args:
        limit: bytes of tensors that are kept; one state is kept in any case.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._states: OrderedDict[int, KeptState] = OrderedDict()

    def __contains__(self, updates: int) -> bool:
        return updates in self._states

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def get(self, updates: int) -> KeptState:
        """Return a state."""
        self._states.move_to_end(updates)
        return self._states[updates]

    def put(self, updates: int, state: KeptState) -> None:
        """Add a state, and drop others if the limit requires it."""
        self._states[updates] = state
        self._states.move_to_end(updates)
        while len(self._states) > 1 and self.size > self.limit:
            self._states.popitem(last=False)

    @property
    def size(self) -> int:
        """Bytes of all states."""
        return sum(state.size for state in self._states.values())


class Visit:
    """Holds a past run in the state that it had just before an update.

    Updates are trained again from the nearest state before them: a checkpoint or a state in the
    cache. Tests in between run again too, as do hooks that act on the training.

    Args:
        past: the run.
        update: where to begin.
        memory: bytes for states to which a move returns without training.
        moved: called after each move, which replaces the objects `task` and `batches`.

    Attributes:
        update: the next update, from 1; one more than the run has at its end.
        batches: its micro-batches as the task gets them; empty at the end of the run.
        first_difference: the first update of a move that differs from the ledger, with its
            components; None if there is none.
        replayed: number of updates that the last move has trained.
        checked: number of these that were compared with the ledger.
        began: number of updates before the state from which the last move began.
    """

    def __init__(
        self,
        past: PastRun,
        update: int,
        *,
        memory: int = 2**30,
        moved: Callable[["Visit"], None] = lambda visit: None,
    ) -> None:
        self.past = past
        self.batches: list[Batch] = []
        self.first_difference: tuple[int, tuple[str, ...]] | None = None
        self.began = 0
        self.replayed = 0
        self.checked = 0
        self._moved = moved
        self._cache = StateCache(memory)
        self._stack = ExitStack()
        self._engine: PhaseEngine[Task] | None = None
        self._steps: Iterator[list[Batch]] = iter(())
        self._ledger = LedgerHook()
        self._keeper = _Keeper(None, self._keep)
        self._start = ReplayStart(past.plan, RunState(), past.setup.machine)
        self._target: int | None = None
        self._state_size = 0
        # Without an object, `__exit__` is not called: also Ctrl-C must end workers and hooks here.
        try:
            self.goto(update)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def engine(self) -> PhaseEngine[Task]:
        """The run as hooks see it."""
        assert self._engine is not None, "the visit was closed"
        return self._engine

    @property
    def task(self) -> Task:
        """The task, with the weights before the update."""
        return self.engine.task

    @property
    def update(self) -> int:
        """The next update, from 1."""
        return self.engine.state.updates + 1

    @property
    def phase(self) -> Phase | None:
        """The phase of the update; None at the end of the run."""
        if not self.batches:
            return None
        return self.engine.plan.phases[self.engine.state.phase]

    def goto(self, update: int) -> None:
        """Restore the state of the run just before another update; changes of the present state are
        lost.

        Raises:
            ConfigError: the run has not made the update before it (code `at.no_such_update`), or
                skips the update, because all of its samples are excluded (`at.no_samples`).
        """
        self.past.check_update(update)
        self._begin(update)
        self._target = update
        self._advance()
        while self.batches and self.update < update:
            self.engine.finish(self.engine.compute(self.batches))
            self._advance()
        self._target = None
        if self.update < update:
            raise ConfigError(
                f"update {update}: trained again, the run ends after update {self.update - 1}, so "
                "a hook or the plan differs from the run; expected an update up to "
                f"{self.update}",
                code="at.no_such_update",
            )
        if self.update > update:
            raise ConfigError(
                f"update {update}: DATA.TRAIN.exclude leaves out all of its samples, so the run "
                f"skips it; choose {self.update}",
                code="at.no_samples",
            )
        self._check_move()
        self._moved(self)

    def back(self, count: int = 1) -> None:
        """Go back some updates, see `goto`."""
        self.goto(self.update - count)

    def step(self) -> StepReport:
        """Train the update, and move on to the next one.

        Raises:
            ConfigError: the run has ended (code `at.end`).
        """
        if not self.batches:
            raise ConfigError(
                f"update {self.update}: the run ends before it, so there is none to train; go back "
                "with goto(n) or back()",
                code="at.end",
            )
        number = self.update
        task = self.task
        before = _copy_tensors(task.model.state_dict())
        out, norm = self._compute()
        report = StepReport(
            number,
            float(out.loss),
            norm,
            task.updater.lr,
            out.samples,
            None,
            self.past.components,
            compare_tensors(before, task.model.state_dict()),
        )
        self.engine.finish(out)
        self._advance()
        differs = self._compare(number)
        self._moved(self)
        return replace(report, differs=None if differs is None else tuple(differs))

    def train(self) -> tuple[float, float | None]:
        """Train the update with the present batches, compare nothing, and move on to the next one;
        return the mean loss over its samples and the norm of the gradient."""
        out, norm = self._compute()
        self.engine.finish(out)
        self._advance()
        return float(out.loss), norm

    def diff(self, update: int) -> Changes:
        """Return how the tensors of the present state differ from those before another update.

        The position stays, and so do changes of the present state. Sums of meters and positions in
        the data are left out.
        """
        now = _copy_tensors(self.task.shared_state())
        if update - 1 in self._cache:
            other = self._cache.get(update - 1).state["task"]
        else:
            here = self.update
            self.goto(update)
            other = _copy_tensors(self.task.shared_state())
            self.goto(here)
            self.task.restore(SavedTask(_copy_tensors(now)), "computed")
        return compare_tensors(_name_tensors(other), _name_tensors(now))

    @property
    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Split -> metrics of its last phase since the last move."""
        return self._keeper.metrics

    def has_state(self, update: int) -> bool:
        """Return whether the state before an update is in memory."""
        return update - 1 in self._cache

    def close(self) -> None:
        """Leave the run."""
        self._stack.close()

    def _compute(self) -> tuple[StepOutput, float | None]:
        """Train the update; return its output and the norm of the gradient before clipping."""
        self._keeper.norm = None
        self._keeper.measures_norm = True
        out = self.engine.compute(self.batches)
        self._keeper.measures_norm = False
        norm = self.task.updater.gradients.norm
        if norm is None:
            norm = self._keeper.norm
        return out, None if norm is None else float(norm)

    def _begin(self, update: int) -> None:
        """Build the run at the nearest state before an update."""
        kept = max((at for at in self._cache if at < update), default=-1)
        start = self._cache.get(kept).start if kept >= 0 else None
        if kept < update - 1:
            from_disk = self.past.find_start(update)
            if from_disk.state.updates > kept:
                start, kept = from_disk, -1
        assert start is not None, "there is a state or a start before every update"
        loaded = start.loaded
        if kept >= 0:
            # A copy: training changes the tensors of the run that is built, not the cached ones.
            state = _copy_tensors(self._cache.get(kept).state)
            if loaded is None:
                # The state was cached before the first checkpoint. `restore` reads no manifest.
                loaded = LoadedCheckpoint("the start", None, {}, state)  # type: ignore[arg-type]
            loaded = replace(loaded, content=state)
        self.close()
        self._announce(update - 1 - start.state.updates, start, is_cached=kept >= 0)
        self._keeper = _Keeper(loaded, self._keep)
        self._ledger = LedgerHook(self._find_content(update))
        self.began = start.state.updates
        # The engine counts in the position that it gets, and a kept one is used again.
        position = replace(start.state)
        if start.loaded is not None:
            start = replace(start, loaded=replace(start.loaded, content={}))
        self._start = start
        self._engine = self._stack.enter_context(
            open_replay(
                self.past.setup,
                self.past.data,
                replace(start, state=position),
                {"visit": self._keeper, LABEL: self._ledger},
            )
        )
        self._steps = self._engine.steps()

    def _advance(self) -> None:
        """Count the step that was trained, if any, and fetch the batches of the next update."""
        self.batches = next(self._steps, [])

    def _announce(self, updates: int, start: ReplayStart, *, is_cached: bool) -> None:
        if not updates:
            return
        source = "the start of the run"
        if is_cached:
            source = "a state in memory"
        elif start.loaded is not None:
            source = start.loaded.path
        count = format_count(updates, "update")
        self.past.announce(f"{count} again from {source} (update {start.state.updates})", updates)

    def _find_content(self, update: int) -> Content:
        ledger = self.past.ledger
        if not ledger:
            return "none"
        return find_content(ledger[min(update, ledger.last)])

    def _keep(self, run: Run) -> None:
        """Keep the state of the run if stepping back will need it, and there is memory for it."""
        updates = run.state.updates
        if self._target is not None:
            # The first state is kept in any case: its size is not known yet.
            room = self._cache.limit // self._state_size if self._state_size else self._target
            if updates + max(1, room) < self._target:
                return
        elif self._compare(updates) != []:
            return  # it is not certain that this is the state of the run
        state = collect_state(run)
        state["hooks"] = {label: kept for label, kept in state["hooks"].items() if label != LABEL}
        size = sum(tensor.nbytes for tensor in list_tensors(state))
        self._state_size = max(size, 1)
        start = replace(self._start, state=replace(run.state))
        self._cache.put(updates, KeptState(start, _copy_tensors(state, to_cpu=True), size))

    def _compare(self, update: int) -> list[str] | None:
        """Return the components in which an update that was trained differs from the ledger."""
        self._ledger.on_save(self.engine)  # writes the pending records
        record = read_records(self.engine).get(update)
        return None if record is None else self.past.compare(record)

    def _check_move(self) -> None:
        self._ledger.on_save(self.engine)
        replayed = read_records(self.engine)
        verdicts = {number: self.past.compare(replayed[number]) for number in replayed}
        self.replayed = len(verdicts)
        self.checked = sum(differs is not None for differs in verdicts.values())
        self.first_difference = next(
            ((number, tuple(differs)) for number, differs in verdicts.items() if differs), None
        )


class _Keeper(Hook):
    """Restores a state, offers the states between two steps, and measures gradients.

    Args:
        loaded: the state to begin with; None: the initial one.
        keep: called with the run wherever a resume could begin.

    Attributes:
        measures_norm: whether to measure the gradient of the current update.
        norm: Euclidean norm of the gradient, over the weights of the main optimizer; None if no
            weight has a gradient.
        metrics: split -> metrics of its last phase.
    """

    main_only = False

    def __init__(self, loaded: LoadedCheckpoint | None, keep: Callable[[Run], None]) -> None:
        self._loaded = loaded
        self._offer = keep
        self.measures_norm = False
        self.norm: Tensor | None = None
        self.metrics: dict[str, dict[str, float]] = {}

    def on_start(self, run: Run) -> None:
        """Restore the state."""
        if self._loaded is not None:
            restore(run, self._loaded)
            run.resumed_from = self._loaded.path
            self._loaded = None  # its tensors would stay in memory
        self._offer(run)

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Measure the gradient; after the last micro-batch it is complete."""
        if not self.measures_norm:
            return
        updater = run.task.updater
        gradients = [
            weight.grad for weight in updater.gradients.parameters if weight.grad is not None
        ]
        self.norm = get_total_norm(gradients) if gradients else None
        if self.norm is not None and updater.scaler is not None:
            self.norm = self.norm / updater.scaler.get_scale()

    # The first hook of a run gets closing events last, as the checkpoint hook does.
    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Offer the state after an update."""
        if phase.is_train:
            self._offer(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Offer the state after a phase, which does not need to be run again."""
        self.metrics[phase.split] = dict(metrics)
        self._offer(run)


def compare_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Changes:
    """Return how tensors of the same names and shapes differ, the largest relative change first."""
    changes = []
    for name, value in before.items():
        other = after.get(name)
        if other is None or other.shape != value.shape:
            continue
        old, new = (tensor.detach().cpu() for tensor in (value, other))
        # NaN equals NaN.
        differs = (old != new) & ~((old != old) & (new != new))
        entries = int(differs.sum())
        if entries:
            difference = new.double() - old.double()
            norm = float(old.double().norm())
            relative = float(difference.norm()) / norm if norm else float("inf")
            largest = float(difference.abs().max())
            changes.append(TensorChange(name, entries, old.numel(), largest, relative))
    return Changes(sorted(changes, key=lambda change: -change.relative))


def _name_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by their path in the state of a task, without meters, data and logs."""
    kept = {name: part for name, part in state.items() if not name.startswith(WITHOUT_WEIGHTS)}
    return dict(flatten_state(kept)[1])


def _copy_tensors(state: Any, *, to_cpu: bool = False) -> Any:
    """Return a state with copies of its tensors."""
    return map_tensors(
        state,
        lambda tensor: tensor.detach().to("cpu" if to_cpu else tensor.device, copy=True),
    )
