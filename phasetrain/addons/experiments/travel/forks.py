"""Forks of a past run: the updates to a spike, trained again with one change, in memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from phasetrain.addons.experiments.travel.past_run import PastRun
from phasetrain.addons.experiments.travel.spikes import Spike
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.engine.batch import Batch
from phasetrain.errors import NumericsError
from phasetrain.optim.multi_optimizer import MultiOptimizer
from phasetrain.runtime.nested import map_tensors

AFTER = 2
"""Updates after the spike that are trained too if a change removes it."""

UNMEASURABLE = (RuntimeError, ValueError, TypeError, NotImplementedError)
"""Errors of models that cannot take one sample alone, or have no gradient outside of training."""


@dataclass(frozen=True)
class Goal:
    """The value that is too high.

    Attributes:
        name: `loss`, of an update, or `SPLIT/METRIC`.
        update: the update with this loss, or the last one before the test.
        suspect: the update whose batch is suspected first.
        spike: the value, and what would be usual.
        sign: -1 if a small value of the metric is bad, 1 otherwise; the values of the spike are
            multiplied by it.
    """

    name: str
    update: int
    suspect: int
    spike: Spike
    sign: float = 1.0

    def is_gone(self, value: float | None) -> bool:
        """Return whether a value is no spike any more, and at most half as far above the median; or
        usual, or None, as of an update without samples."""
        if value is None:
            return True
        spike, value = self.spike, self.sign * value
        if not isfinite(value):
            return False
        is_halved = not value - spike.median > (spike.value - spike.median) / 2
        return value <= spike.usual or (value <= spike.limit and is_halved)


@dataclass(frozen=True)
class Fork:
    """The updates to the spike, trained again with a change of one update.

    Attributes:
        update: the update that was changed.
        change: the change.
        value: the loss or metric; None if the change leaves no sample.
        after: losses of the updates after the spike, if it was removed.
        removes: whether the spike is gone.
    """

    update: int
    change: str
    value: float | None
    after: tuple[float, ...]
    removes: bool


@dataclass(frozen=True)
class SampleScore:
    """A sample of a batch, alone, in the state before an update.

    Attributes:
        place: its place in the batch, from 0.
        id: its index in the dataset; None if it has none.
        loss: its loss, measured as in a test; NaN if it cannot be measured.
        gradient_norm: Euclidean norm of its gradient; NaN if it cannot be measured.
    """

    place: int
    id: int | None
    loss: float
    gradient_norm: float

    @property
    def name(self) -> str:
        """The sample, for people."""
        return f"at place {self.place}" if self.id is None else f"{self.id:,}"


class OverBudgetError(Exception):
    """The next step would train more updates than allowed."""


Apply = Callable[[Visit], AbstractContextManager[object]]
"""Changes the run that stands before an update, for as long as the context lasts."""


class Forks:
    """Trains forks of a past run within a budget.

    Args:
        visit: the run.
        goal: the value to watch.
        limit: maximum number of updates to train.
        replayed: updates that were trained to reach the first state.

    Attributes:
        replayed: updates that were trained to reach states of the run.
        trained: updates that were trained in forks, and measurements of all samples of an update.
        forks: the forks, in order.
        skipped: changes that were not tried, because they would have exceeded the limit.
    """

    def __init__(self, visit: Visit, goal: Goal, limit: int, replayed: int) -> None:
        self.visit = visit
        self.goal = goal
        self.limit = limit
        self.replayed = replayed
        self.trained = 0
        self.forks: list[Fork] = []
        self.skipped: list[str] = []

    @property
    def cost(self) -> int:
        """Number of updates that were trained."""
        return self.replayed + self.trained

    def restore(self, update: int, more: int) -> None:
        """Restore the state of the run before an update.

        Args:
            update: the update.
            more: number of updates that will be trained from there.

        Raises:
            OverBudgetError: the limit does not allow it.
        """
        replayed = 0 if self.visit.has_state(update) else count_replayed(self.visit.past, update)
        if self.cost + replayed + more > self.limit:
            raise OverBudgetError
        self.visit.goto(update)
        self.replayed += self.visit.replayed
        self.trained += more

    def fork(self, update: int, change: str, apply: Apply, *, further: bool = True) -> Fork | None:
        """Train the updates from a changed one to the goal; None if the limit does not allow it.

        Args:
            update: the update.
            change: the change as text.
            apply: makes the change.
            further: train a little further if the change removes the spike.
        """
        goal, visit = self.goal, self.visit
        try:
            self.restore(update, goal.update - update + 1)
        except OverBudgetError:
            self.skipped.append(f"update {update} {change}")
            return None
        value: float | None = nan
        try:
            with apply(visit):
                value = self._train()
            while visit.update <= goal.update:
                value = self._train()
            if goal.name != "loss":
                split, _, metric = goal.name.partition("/")
                value = visit.metrics.get(split, {}).get(metric, nan)
        except NumericsError:
            value = nan
        removes = goal.is_gone(value)
        after: list[float] = []
        if removes and further and goal.name == "loss":
            try:
                while visit.batches and len(after) < AFTER and self.cost < self.limit:
                    self.trained += 1
                    after.append(visit.train()[0])
            except NumericsError:
                after.append(nan)
        made = Fork(update, change, value, tuple(after), removes)
        self.forks.append(made)
        return made

    def _train(self) -> float | None:
        """Train an update, and return its loss; None without a sample."""
        has_samples = bool(self.visit.batches)
        loss, _ = self.visit.train()
        return loss if has_samples else None

    def move_batch(self, update: int) -> Fork:
        """Train an update with the batch of the next one.

        Raises:
            OverBudgetError: the limit does not allow it.
        """
        self.restore(update + 1, 0)
        batches = self.visit.batches
        self.restore(update, 1)
        self.visit.batches = batches
        try:
            value = self._train()
        except NumericsError:
            value = nan
        text = f"with the samples of update {update + 1}"
        made = Fork(update, text, value, (), self.goal.is_gone(value))
        self.forks.append(made)
        return made

    def measure(self, update: int) -> list[SampleScore]:
        """Return loss and gradient norm of each sample of an update in the state before it.

        Raises:
            OverBudgetError: the limit does not allow it.
        """
        self.restore(update, 1)
        return list(_measure_samples(self.visit))


def count_replayed(past: PastRun, update: int) -> int:
    """Return how many updates have to be trained to reach the state before an update."""
    begins = [int(saved.manifest.state["updates"]) for saved in past.list_checkpoints()]
    return update - 1 - max((begin for begin in begins if begin < update), default=0)


def list_samples(batches: Sequence[Batch]) -> list[tuple[Batch, int, int | None]]:
    """Return batch, row and id of each sample of an update, by place."""
    samples = []
    for batch in batches:
        rows = range(batch.size) if batch.mask is None else batch.mask.nonzero().flatten().tolist()
        ids: list[int | None] = list(batch.ids.tolist())
        ids += [None] * (len(rows) - len(ids))
        samples += [(batch, row, id_) for row, id_ in zip(rows, ids, strict=True)]
    return samples


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a batch of some rows of another one."""
    total = batch.size if batch.mask is None else len(batch.mask)
    index = torch.tensor(rows, dtype=torch.int64)

    def select(tensor: Tensor) -> Tensor:
        if not tensor.ndim or len(tensor) != total:
            return tensor
        return tensor[index.to(tensor.device)]

    counted = [row for _, row, _ in list_samples([batch])]
    ids = [batch.ids[counted.index(row)] for row in rows if row in counted and len(batch.ids)]
    return replace(
        batch,
        input=map_tensors(batch.input, select),
        target=map_tensors(batch.target, select),
        mask=map_tensors(batch.mask, select),
        ids=torch.stack(ids) if ids else batch.ids[:0],
        size=len(rows),
        weight=None,
    )


@contextmanager
def without_samples(places: Sequence[int], visit: Visit) -> Iterator[None]:
    """Leave samples out of the update, as DATA.TRAIN.exclude does."""
    samples = list_samples(visit.batches)
    kept = [(batch, row) for place, (batch, row, _) in enumerate(samples) if place not in places]
    batches = []
    for batch in visit.batches:
        rows = [row for other, row in kept if other is batch]
        if not rows:
            continue
        smaller = select_rows(batch, rows)
        if batch.weight is not None:
            smaller.weight = visit.task.weight_of(smaller)
        batches.append(smaller)
    visit.batches = batches
    yield


@contextmanager
def with_learning_rate(change: Callable[[float], float], visit: Visit) -> Iterator[None]:
    """Step with another learning rate, whatever schedules and hooks have set."""
    kept: list[tuple[dict[str, Any], Any]] = []

    def begin(optimizer: torch.optim.Optimizer, *_call: object) -> None:
        for group in optimizer.param_groups:
            kept.append((group, group["lr"]))
            group["lr"] = change(float(group["lr"]))

    def end(*_call: object) -> None:
        for group, lr in kept:
            group["lr"] = lr
        kept.clear()

    optimizers = [updater.optimizer for updater in visit.task.updaters.values()]
    hooks = [
        handle
        for optimizer in optimizers
        for handle in (
            optimizer.register_step_pre_hook(begin),
            optimizer.register_step_post_hook(end),
        )
    ]
    yield
    for handle in hooks:
        handle.remove()


@contextmanager
def with_clipping(norm: float, visit: Visit) -> Iterator[None]:
    """Limit the norm of the gradient."""
    gradients = visit.task.updater.gradients
    before = gradients.settings, gradients.clips
    gradients.settings, gradients.clips = replace(gradients.settings, clip_norm=norm), True
    yield
    gradients.settings, gradients.clips = before


@contextmanager
def with_float32(visit: Visit) -> Iterator[None]:
    """Compute the forward pass without autocast."""
    task: Any = visit.task
    forward = task.forward

    def compute(batch: Batch) -> Any:
        with torch.autocast(task.parts.machine.device.type, enabled=False):
            return forward(batch)

    task.forward = compute
    yield
    del task.forward


def with_fresh_optimizer(visit: Visit) -> AbstractContextManager[None]:
    """Forget the state of the optimizers, such as momentum."""
    for updater in visit.task.updaters.values():
        optimizer = updater.optimizer
        parts = [optimizer]
        if isinstance(optimizer, MultiOptimizer):
            parts = list(optimizer.optimizers.values())
        for part in parts:
            part.state.clear()
    return nullcontext()


def _measure_samples(visit: Visit) -> Iterator[SampleScore]:
    """Yield the scores of the samples of an update in the state before it."""
    task = visit.task
    weights = [
        weight
        for updater in task.updaters.values()
        for weight in updater.gradients.parameters
        if weight.requires_grad
    ]
    # One sample alone has no batch statistics, and dropout would hide its loss.
    task.model.eval()
    for place, (batch, row, id_) in enumerate(list_samples(visit.batches)):
        alone = select_rows(batch, [row])
        if batch.weight is not None:
            alone.weight = task.weight_of(alone)
        loss = norm = nan
        with suppress(*UNMEASURABLE), task.parts.machine.autocast():
            out = task.forward(alone)
            loss = float(out.loss.detach())
            gradients = torch.autograd.grad(out.loss, weights, allow_unused=True)
            norm = float(get_total_norm([grad for grad in gradients if grad is not None]))
        yield SampleScore(place, id_, loss, norm)
