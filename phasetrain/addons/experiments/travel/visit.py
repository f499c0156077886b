"""A visit to a past run: the state just before an update, and moves to other updates."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

from phasetrain.addons.experiments.replay.updates import ReplayStart, open_replay, read_records
from phasetrain.addons.experiments.travel.past_run import PastRun
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.codec import flatten_state
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, LedgerHook, Run
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


class StateCache(dict[int, KeptState]):
    """States by the number of updates before them; the least recently used is dropped first.

    Args:
        limit: bytes of tensors that are kept; one state is kept in any case.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def use(self, updates: int) -> KeptState:
        """Return a state, which is now the last one to be dropped."""
        self[updates] = self.pop(updates)
        return self[updates]

    def put(self, updates: int, state: KeptState) -> None:
        """Add a state, and drop others if the limit requires it."""
        self.pop(updates, None)
        self[updates] = state
        while len(self) > 1 and sum(kept.size for kept in self.values()) > self.limit:
            del self[next(iter(self))]


class Visit(ExitStack):
    """Holds a past run in the state that it had just before an update, until it is closed.

    Updates are trained again from the nearest state before them: a checkpoint or a state in the
    cache. Tests in between run again too, as do hooks that act on the training.

    Args:
        past: the run.
        update: where to begin.
        memory: bytes for states to which a move returns without training.
        moved: called after each move, which replaces the objects `task` and `batches`.

    Attributes:
        engine: the run as hooks see it.
        task: the task, with the weights before the update.
        metrics: split -> metrics of its last phase since the last move.
        update: the next update, from 1; one more than the run has at its end.
        states: the states in memory, by the number of updates before them.
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
        super().__init__()
        self.past = past
        self._moved = moved
        self.states = StateCache(memory)
        self._target: int | None = None
        # Without an object, `__exit__` is not called: also Ctrl-C must end workers and hooks here.
        try:
            self.goto(update)
        except BaseException:
            self.close()
            raise

    @property
    def update(self) -> int:
        """The next update, from 1."""
        return self.engine.state.updates + 1

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
            self.train()
        self._target = None
        if self.update != update:
            raise ConfigError(
                f"update {update}: trained again, the run has no such update, but {self.update}: "
                "DATA.TRAIN.exclude leaves out all of its samples, or a hook or the plan differs "
                f"from the run; choose {self.update}",
                code="at.no_samples",
            )
        self._ledger.on_save(self.engine)  # writes the pending records
        replayed = read_records(self.engine)
        self.replayed = len(replayed)
        self.checked, self.first_difference = self.past.compare_all(replayed)
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
        model = self.task.model
        before = _copy_tensors(model.state_dict())
        self._keeper.measures_norm = True
        out = self.engine.compute(self.batches)
        self._keeper.measures_norm = False
        norm = self.task.updater.gradients.norm
        if norm is None:
            norm = self._keeper.norm
        lr = self.task.updater.lr
        changed = compare_tensors(before, model.state_dict())
        self.engine.finish(out)
        self._advance()
        differs = self._compare(number)
        self._moved(self)
        return StepReport(
            number,
            float(out.loss),
            None if norm is None else float(norm),
            lr,
            out.samples,
            differs,
            self.past.components,
            changed,
        )

    def train(self) -> StepOutput:
        """Train the update with the present batches, compare nothing, and move on to the next
        one."""
        out = self.engine.compute(self.batches)
        self.engine.finish(out)
        self._advance()
        return out

    def diff(self, update: int) -> Changes:
        """Return how the tensors of the present state differ from those before another update.

        The position stays, and so do changes of the present state. Sums of meters and positions in
        the data are left out.
        """
        now = _copy_tensors(self.task.shared_state())
        if update - 1 in self.states:
            other = self.states.use(update - 1).state["task"]
        else:
            here = self.update
            self.goto(update)
            other = _copy_tensors(self.task.shared_state())
            self.goto(here)
            self.task.restore(SavedTask(_copy_tensors(now)), "computed")
        return compare_tensors(_name_tensors(other), _name_tensors(now))

    def _begin(self, update: int) -> None:
        """Build the run at the nearest state before an update."""
        kept = max((at for at in self.states if at < update), default=-1)
        start = None if kept == update - 1 else self.past.find_start(update)
        loaded = None if start is None else start.loaded
        source = "the start of the run" if loaded is None else loaded.path
        if start is None or start.state.updates <= kept:
            source = "a state in memory"
            start = self.states.use(kept).start
            # A state that was cached before the first checkpoint has none; `restore` reads no
            # manifest.
            loaded = start.loaded or LoadedCheckpoint(source, None, {}, {})  # type: ignore[arg-type]
            # A copy: training changes the tensors of the run that is built, not the cached ones.
            loaded = replace(loaded, content=_copy_tensors(self.states[kept].state))
        self.close()
        self.began = start.state.updates
        updates = update - 1 - self.began
        if updates:
            count = format_count(updates, "update")
            self.past.announce(f"{count} again from {source} (update {self.began})", updates)
        self._keeper = _Keeper(loaded, self._keep)
        self._ledger = LedgerHook(self.past.find_content(update))
        if start.loaded is not None:
            start = replace(start, loaded=replace(start.loaded, content={}))
        self._start = start
        # The engine counts in the position that it gets, and a kept one is used again.
        own = replace(start, state=replace(start.state))
        hooks = {"visit": self._keeper, LABEL: self._ledger}
        self.engine: PhaseEngine[Task] = self.enter_context(
            open_replay(self.past.setup, self.past.data, own, hooks)
        )
        self.task = self.engine.task
        self.metrics = self._keeper.metrics
        self._steps = self.engine.steps()

    def _advance(self) -> None:
        """Count the step that was trained, if any, and fetch the batches of the next update."""
        self.batches = next(self._steps, [])

    def _keep(self, run: Run) -> None:
        """Keep the state of the run if stepping back will need it, and there is memory for it."""
        updates = run.state.updates
        if self._target is not None:
            # The first state is kept in any case: its size is not known yet.
            size = max((state.size for state in self.states.values()), default=0)
            room = self.states.limit // size if size else self._target
            if updates + max(1, room) < self._target:
                return
        elif self._compare(updates) != ():
            return  # it is not certain that this is the state of the run
        state = collect_state(run)
        state["hooks"] = {label: kept for label, kept in state["hooks"].items() if label != LABEL}
        size = sum(tensor.nbytes for tensor in list_tensors(state))
        start = replace(self._start, state=replace(run.state))
        self.states.put(updates, KeptState(start, _copy_tensors(state, to_cpu=True), size))

    def _compare(self, update: int) -> tuple[str, ...] | None:
        """Return the components in which an update that was trained differs from the ledger."""
        self._ledger.on_save(self.engine)  # writes the pending records
        return self.past.compare(read_records(self.engine).get(update))


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
        weights = updater.gradients.parameters
        gradients = [weight.grad for weight in weights if weight.grad is not None]
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
        state, lambda tensor: tensor.detach().to("cpu" if to_cpu else tensor.device, copy=True)
    )
