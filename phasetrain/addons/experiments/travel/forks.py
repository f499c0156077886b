"""Forks of a past run: the updates to a spike, trained again with one change, in memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from phasetrain.addons.experiments.travel.past_run import Difference
from phasetrain.addons.experiments.travel.spikes import Spike
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.engine.batch import Batch
from phasetrain.errors import ChangedError, NumericsError
from phasetrain.optim.multi_optimizer import MultiOptimizer
from phasetrain.runtime.format import join_first
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
        spike: the value, and the usual value.
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
    after: tuple[float | None, ...]
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


@dataclass(frozen=True)
class Cause:
    """The proven cause.

    Attributes:
        kind: `sample`, `samples`, `learning_rate`, `clip`, `state` or `precision`.
        update: the update in which it acted.
        text: the cause as a sentence without the values.
        fork: the fork without it.
        samples: the samples that are the cause.
    """

    kind: str
    update: int
    text: str
    fork: Fork
    samples: tuple[SampleScore, ...] = ()


Apply = Callable[[Visit], AbstractContextManager[object]]
"""Changes the run that stands before an update, for as long as the context lasts."""


class Forks:
    """Trains forks of a past run within a budget.

    Args:
        visit: the run.
        goal: the value to watch.
        limit: maximum number of updates to train.

    Attributes:
        replayed: updates that were trained to reach states of the run.
        trained: updates that were trained in forks, and measurements of all samples of an update.
        forks: the forks, in order.
        skipped: changes that were not tried, because they would have exceeded the limit.

    Raises:
        ChangedError: an update that leads to the state differs from the run (code `why.differs`).
    """

    def __init__(self, visit: Visit, goal: Goal, limit: int) -> None:
        self.visit = visit
        self.goal = goal
        self.limit = limit
        self.replayed = 0
        self.trained = 0
        self.forks: list[Fork] = []
        self.skipped: list[str] = []
        self.check(visit.replayed, visit.first_difference)

    @property
    def cost(self) -> int:
        """Number of updates that were trained."""
        return self.replayed + self.trained

    def restore(self, update: int, more: int) -> bool:
        """Restore the state of the run before an update; False if the limit does not allow it.

        Args:
            update: the update.
            more: number of updates that will be trained from there.

        Raises:
            ChangedError: an update on the way differs from the run (code `why.differs`).
        """
        replayed = self.visit.past.count_replayed(update, self.visit.states)
        if self.cost + replayed + more > self.limit:
            return False
        self.visit.goto(update)
        self.check(self.visit.replayed, self.visit.first_difference)
        self.trained += more
        return True

    def check(self, replayed: int, difference: Difference | None) -> None:
        """Count updates of the run that were trained again, and reject a difference.

        Raises:
            ChangedError: there is one (code `why.differs`).
        """
        self.replayed += replayed
        if difference is not None:
            update, components = difference
            raise ChangedError(
                f"update {update}, trained again, is not the update of the run: "
                f"{', '.join(components)} differ from the ledger, so forks would prove nothing "
                f"about it; phasetrain replay {self.visit.past.folder.path} RUN.step={update} "
                "shows why",
                code="why.differs",
            )

    def fork(
        self, update: int, change: str, apply: Apply, *, further: bool = True, last: int = 0
    ) -> Fork | None:
        """Train the updates from a changed one to the goal; None if the limit does not allow it.

        Args:
            update: the update.
            change: the change as text.
            apply: makes the change.
            further: train a little further if the change removes the spike.
            last: the update whose loss is compared; 0: the one of the goal.
        """
        goal, visit = self.goal, self.visit
        last = last or goal.update
        if not self.restore(update, last - update + 1):
            self.skipped.append(f"update {update} {change}")
            return None
        with apply(visit):
            value = self._train()
        while visit.batches and visit.update <= last:
            value = self._train()
        if goal.name != "loss" and visit.update > last:
            split, _, metric = goal.name.partition("/")
            value = visit.metrics.get(split, {}).get(metric, nan)
        removes = goal.is_gone(value)
        after: list[float | None] = []
        rest = AFTER if removes and further and goal.name == "loss" else 0
        while visit.batches and len(after) < rest and self.cost < self.limit:
            self.trained += 1
            after.append(self._train())
        made = Fork(update, change, value, tuple(after), removes)
        self.forks.append(made)
        return made

    def _train(self) -> float | None:
        """Train an update, and return its loss; None without a sample, NaN if it ends the run."""
        has_samples = bool(self.visit.batches)
        try:
            loss = float(self.visit.train().loss)
        except NumericsError:
            self.visit.batches = []
            return nan
        return loss if has_samples else None

    def measure(self, update: int) -> list[SampleScore]:
        """Return loss and gradient norm of each sample of an update in the state before it; none if
        the limit does not allow it."""
        if not self.restore(update, 1):
            self.skipped.append(f"update {update} without one of its samples")
            return []
        task = self.visit.task
        weights = [
            weight
            for updater in task.updaters.values()
            for weight in updater.gradients.parameters
            if weight.requires_grad
        ]
        # One sample alone has no batch statistics, and dropout would hide its loss.
        task.model.eval()
        scores = []
        for place, (batch, row, id_) in enumerate(list_samples(self.visit.batches)):
            alone = select_rows(batch, [row])
            if batch.weight is not None:
                alone.weight = task.weight_of(alone)
            loss = norm = nan
            with suppress(*UNMEASURABLE), task.parts.machine.autocast():
                out = task.forward(alone)
                loss = float(out.loss.detach())
                gradients = torch.autograd.grad(out.loss, weights, allow_unused=True)
                norm = float(get_total_norm([grad for grad in gradients if grad is not None]))
            scores.append(SampleScore(place, id_, loss, norm))
        return scores


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
    samples = enumerate(list_samples(visit.batches))
    kept = [(batch, row) for place, (batch, row, _) in samples if place not in places]
    batches = []
    for batch in visit.batches:
        rows = [row for other, row in kept if other is batch]
        if rows:
            smaller = select_rows(batch, rows)
            if batch.weight is not None:
                smaller.weight = visit.task.weight_of(smaller)
            batches.append(smaller)
    visit.batches = batches
    yield


@contextmanager
def with_batches(batches: list[Batch], visit: Visit) -> Iterator[None]:
    """Train the update with other batches."""
    visit.batches = batches
    yield


@contextmanager
def with_learning_rate(factor: float, visit: Visit) -> Iterator[None]:
    """Multiply the learning rate, whatever schedules and hooks have set."""
    kept: list[tuple[dict[str, Any], Any]] = []

    def begin(optimizer: torch.optim.Optimizer, *_call: object) -> None:
        for group in optimizer.param_groups:
            kept.append((group, group["lr"]))
            group["lr"] = factor * float(group["lr"])

    def end(*_call: object) -> None:
        for group, lr in kept:
            group["lr"] = lr
        kept.clear()

    with ExitStack() as hooks:
        for updater in visit.task.updaters.values():
            hooks.callback(updater.optimizer.register_step_pre_hook(begin).remove)
            hooks.callback(updater.optimizer.register_step_post_hook(end).remove)
        yield


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


@contextmanager
def with_fresh_optimizer(visit: Visit) -> Iterator[None]:
    """Forget the state of the optimizers, such as momentum."""
    for updater in visit.task.updaters.values():
        optimizer = updater.optimizer
        parts = [optimizer]
        if isinstance(optimizer, MultiOptimizer):
            parts = list(optimizer.optimizers.values())
        for part in parts:
            part.state.clear()
    yield


Found = tuple[Sequence[SampleScore], Fork]
"""Samples, and the fork without them, in which the spike is gone."""


def name_samples(scores: Sequence[SampleScore]) -> str:
    """Return samples as text."""
    names = join_first([score.name for score in scores], 4)
    return f"sample {names}" if len(scores) == 1 else f"{len(scores)} samples ({names})"


class SampleSearch:
    """Searches the smallest group of samples of an update without which there is no spike.

    Args:
        forks: trains the forks.
        update: the update.
    """

    def __init__(self, forks: Forks, update: int) -> None:
        self._forks = forks
        self._update = update
        # The damage of a sample to the weights shows in later updates, and grows with its gradient.
        self._acts_later = update < forks.goal.update
        self._scores: list[SampleScore] = []

    def find(self) -> Cause | None:
        """Return the samples; None if there are none, or if the budget does not allow to find
        them."""
        self._scores = sorted(self._forks.measure(self._update), key=self._rank)
        group = self._find_group() if self._scores else None
        if group is None or not self._are_special(group[0]):
            return None
        chosen, fork = group
        is_single = len(chosen) == 1
        number, pronoun = ("alone", "it") if is_single else ("together", "them")
        text = f"{name_samples(chosen)} {number}, in update {self._update}: without {pronoun}"
        return Cause("sample" if is_single else "samples", self._update, text, fork, tuple(chosen))

    def _rank(self, score: SampleScore) -> float:
        value = score.gradient_norm if self._acts_later else score.loss
        return -float(np.nan_to_num(value, nan=inf))  # what is not a number comes first

    def _find_group(self) -> Found | None:
        scores = self._scores
        first = self._leave_out(scores[:1])
        if first is None or first.removes:
            return None if first is None else (scores[:1], first)
        # A sample may spoil the loss of others and have a low one itself, as with batch norm.
        half = len(scores) // 2
        for ordered in (scores, scores[half:] + scores[:half]):
            size = half if ordered is scores else len(scores) - half
            without = self._leave_out(ordered[:size]) if size > 1 else None
            if without is not None and without.removes:
                # The first sample alone was not enough.
                return self._narrow(ordered[:size], without, low=int(ordered is scores))
        return None

    def _narrow(self, group: Sequence[SampleScore], without: Fork, low: int) -> Found:
        """Return the smallest part of a group without which there is no spike, a single sample if
        possible; without the first `low` samples there is still a spike."""
        high = len(group)
        while high - low > 1:
            middle = (low + high) // 2
            fork = self._leave_out(group[:middle])
            if fork is None:
                break
            if fork.removes:
                high, without = middle, fork
            else:
                low = middle
        last = group[high - 1 : high]
        alone = without if high == 1 else self._leave_out(last)
        if alone is not None and alone.removes:
            return last, alone
        return group[:high], without

    def _leave_out(self, chosen: Sequence[SampleScore]) -> Fork | None:
        places = [score.place for score in chosen]
        text = f"without {name_samples(chosen)}"
        change = partial(without_samples, places)
        return self._forks.fork(self._update, text, change, further=len(chosen) == 1)

    def _are_special(self, chosen: Sequence[SampleScore]) -> bool:
        """Return whether it is these samples that matter, not the state or any change at all."""
        others = [score for score in self._scores if score not in chosen]
        if not self._acts_later or not others:
            return True
        # Any change of an unstable update may end elsewhere.
        control = self._leave_out(others[-len(chosen) :])
        return control is not None and not control.removes
