"""Averages of the weights over the updates of a run (MODEL.ema, MODEL.swa, MODEL.schedule_free)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import ceil, floor
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from phasetrain.distributed import find_buffers
from phasetrain.distributed.dtensors import is_dtensor, local_shard
from phasetrain.errors import ConfigError
from phasetrain.optim.averaging.average_settings import (
    EMASettings,
    ScheduleFreeSettings,
    Settings,
    SWASettings,
)
from phasetrain.optim.schedules.curves import TOLERANCE
from phasetrain.optim.schedules.durations import RunLength
from phasetrain.runtime.name_patterns import match_names

Skipped = bool | Tensor
"""Whether an update was not made; or a 0-d tensor on the device that is not 0 then."""


class Average(ABC):
    """A copy of a model that follows its weights.

    Parameters are averaged; buffers are copied from the model, except the running statistics of
    batch norms with `average_statistics`.

    Args:
        model: model whose weights are averaged.
        module: a copy of it, see `copy_model`; sharded in the same way as the model.
        match: patterns for the names of parameters to average; the others are copied. Empty: all.
        average_statistics: average the running statistics of batch norms as well.

    Attributes:
        name: name of the average, for messages.
        module: the average, as a model that can be called.
        norms: batch norms that take statistics for the average before it is tested.
        batches: number of training batches for these statistics.

    Raises:
        ConfigError: the dtype of the weights is too coarse for an average to move.
    """

    name: str
    settings: Settings

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        match: Sequence[str] = (),
        *,
        average_statistics: bool = False,
    ) -> None:
        self.module = module
        self.norms: list[_BatchNorm] = []
        self.batches = 0
        module.requires_grad_(requires_grad=False)
        # Always: a resume builds it again, and would not know whether it was tested before.
        module.eval()
        pairs: list[tuple[Tensor, Tensor]] = list(
            zip(module.parameters(), model.parameters(), strict=True)
        )
        # bfloat16 has 8 bits of precision: with a decay of 0.99 and more, a step of the average
        # rounds to nothing.
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.itemsize < 4:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"MODEL.{self.name}: parameter {name!r} is {dtype}, which is too coarse for "
                    "the small steps of an average, so it would not move; keep the weights in "
                    "float32 and set MACHINE.precision=bf16"
                )
        chosen = _choose_parameters(model, match, f"MODEL.{self.name}.match")
        self._averaged: list[tuple[Tensor, Tensor]] = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        for name, pair in zip(dict(model.named_parameters()), pairs, strict=True):
            # Integer parameters (quantised weights, indices) have no mean.
            has_mean = pair[0].is_floating_point() or pair[0].is_complex()
            if has_mean and name in chosen:
                self._averaged.append(pair)
            else:
                self._copied.append(pair)
        self._divided = any(is_dtensor(parameter) for parameter, _ in pairs)
        both = zip(find_buffers(module), find_buffers(model), strict=True)
        # The dicts that hold buffers, not the tensors: a module may replace a buffer, or set it to
        # None.
        self._buffers = [(own, buffers, name) for (own, _), (buffers, name) in both]
        # Other buffers may be masks or queues, which have no mean.
        norms = list_norms(module) if average_statistics else []
        means = {id(own) for own, _ in self._averaged}
        self._norms = {
            id(norm._buffers)
            for norm in norms
            if not match or any(id(own) in means for own in norm.parameters())
        }

    @abstractmethod
    def update(self, updates: int, *, skipped: Skipped = False) -> None:
        """Take the current weights into the average, if they are due.

        Args:
            updates: number of updates attempted so far, the last one included.
            skipped: whether the last one was not made; or a 0-d tensor on the device that is not 0
                then.
        """

    def settle(self) -> bool:
        """Make the average ready for a test; return whether batch norms need new statistics."""
        return bool(self.norms)

    def stateful(self) -> dict[str, Any]:
        """Return the parts to save in a checkpoint, by name."""
        return {self.name: self.module}

    @torch.no_grad()
    def _move(self, share: float | Tensor) -> None:
        """Move the average towards the weights by a share of the distance; a share of 1 copies
        them."""
        averaged = list(self._averaged)
        copied = list(self._copied)
        if self._divided:  # looked up each time: torch may put the pieces elsewhere
            averaged, copied = (
                [(local_shard(own), local_shard(now)) for own, now in pairs]
                for pairs in (averaged, copied)
            )
        for own, buffers, name in self._buffers:
            before = own.get(name)
            now = buffers.get(name)
            if now is None:
                own[name] = None
            elif before is None or before.shape != now.shape or before.dtype != now.dtype:
                own[name] = now.detach().clone()
            elif id(own) in self._norms and name in ("running_mean", "running_var"):
                averaged.append((before, now))
            else:
                copied.append((before, now))
        _lerp([own for own, _ in averaged], [now for _, now in averaged], share)
        _copy([own for own, _ in copied], [now for _, now in copied], share)


def _choose_parameters(model: nn.Module, patterns: Sequence[str], where: str) -> set[str]:
    """Return the names of the parameters that are averaged; without patterns, of all."""
    names = [name for name, _ in model.named_parameters()]
    if not patterns:
        return set(names)
    return {
        name
        for pattern in patterns
        for name in match_names(
            pattern, names, f"{where} = {pattern!r}: no parameter of the model has such a name"
        )
    }


class EMA(Average):
    """A running mean in which each update counts less than the one after it (Polyak and Juditsky
    1992).

    How much it moves is a function of the number of updates attempted, so a checkpoint keeps the
    average alone.

    Args:
        model, module: see `Average`.
        settings: how it moves.
    """

    name = "ema"

    def __init__(self, model: nn.Module, module: nn.Module, settings: EMASettings) -> None:
        average_statistics = settings.statistics == "average"
        super().__init__(model, module, settings.match, average_statistics=average_statistics)
        self.settings: EMASettings = settings

    def update(self, updates: int, *, skipped: Skipped = False) -> None:
        """Move the average at every n-th update, unless that update was skipped."""
        settings = self.settings
        if updates % settings.every or skipped is True:
            return
        times = updates // settings.every - 1
        if settings.warmup:
            decay = min(settings.decay, (1 + times) / (10 + times))
        else:
            decay = settings.decay
        # Whether the last update was made may be known to the device alone; reading it would wait.
        share: float | Tensor = 1 - decay
        if isinstance(skipped, Tensor):
            share = torch.where(skipped != 0, 0.0, 1 - decay)
        self._move(share)


class SWA(Average):
    """The plain mean of the weights at several moments late in a run (Izmailov et al. 2018,
    arXiv:1803.05407).

    Until the first of them it equals the weights. A moment counts even if its update was skipped.

    Args:
        model, module: see `Average`.
        settings: when weights are taken.
        run: length of the run, in which durations are measured.
        frozen: names of modules whose statistics stay.

    Attributes:
        taken: how many times weights were taken.

    Raises:
        ConfigError: weights would never be taken.
    """

    name = "swa"

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        settings: SWASettings,
        run: RunLength,
        frozen: Collection[str] = (),
    ) -> None:
        super().__init__(model, module)
        self.settings: SWASettings = settings
        self.taken = 0
        self._model = model
        self._start = _length("MODEL.swa.start", settings.start, run)
        self._every = max(_length("MODEL.swa.every", settings.every, run), 1.0)
        if run.updates and ceil(self._start - TOLERANCE) > run.updates:
            raise ConfigError(
                f"MODEL.swa.start = {settings.start!r}: the run ends before that, after "
                f"{run.updates} updates; start earlier, or leave MODEL.swa out"
            )
        self.norms = list_norms(module, frozen)
        self.batches = settings.batches

    def update(self, updates: int, *, skipped: Skipped = False) -> None:
        """Take the current weights into the average, if one of the moments has come."""
        # A difference of two counts needs no memory of the last moment, so a resume cannot miss
        # one.
        if updates and self._moments(updates) > self._moments(updates - 1):
            self.taken += 1
            self._move(1 / self.taken)

    def settle(self) -> bool:
        """Copy the weights of the model if none were taken yet; batch norms fit them already."""
        if not self.taken:
            self._move(1.0)
        return bool(self.taken and self.norms)

    def stateful(self) -> dict[str, Any]:
        """Return the parts to save in a checkpoint, by name."""
        return {self.name: self.module, f"{self.name}.taken": self}

    def state_dict(self) -> dict[str, Any]:
        """Return how many times weights were taken."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.taken = int(state["taken"])

    def _moments(self, updates: int) -> int:
        """Return the number of moments up to and including an update."""
        since = (updates - self._start) / self._every
        if since < -TOLERANCE:
            return 0
        return floor(since + TOLERANCE) + 1


class ScheduleFreeOptimizer(Protocol):
    """An optimizer whose weights are in one of two places: `train()` moves them to where gradients
    are taken, `eval()` to where the model is tested and used."""

    param_groups: list[dict[str, Any]]

    def train(self) -> None:
        """Move the weights to where gradients are taken."""
        ...

    def eval(self) -> None:
        """Move the weights to where the model is used."""
        ...


def is_schedule_free(optimizer: object) -> TypeGuard[ScheduleFreeOptimizer]:
    """Return whether an optimizer moves the weights between training and use."""
    return hasattr(optimizer, "train") and hasattr(optimizer, "eval")


class ScheduleFree(Average):
    """The weights that a schedule-free optimizer means for use (Defazio et al. 2024,
    arXiv:2405.15682).

    Moving the weights to them and back, as the optimizer would around a test, would round; a copy
    is moved instead, and the weights in training keep their bits.

    Args:
        model, module: see `Average`.
        settings: how it is tested.
        optimizers: the schedule-free optimizers of the run; empty if nothing trains.
        frozen: names of modules whose statistics stay.
    """

    name = "schedule_free"

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        settings: ScheduleFreeSettings,
        optimizers: Sequence[ScheduleFreeOptimizer],
        frozen: Collection[str] = (),
    ) -> None:
        super().__init__(model, module)
        self.settings: ScheduleFreeSettings = settings
        self.norms = list_norms(module, frozen)
        self.batches = settings.batches
        self._optimizers = optimizers

    @torch.no_grad()
    def update(self, updates: int, *, skipped: Skipped = False) -> None:
        """Compute the weights for use from the weights in training and the optimizer's state."""
        self._move(1.0)
        trained = [(own, now, now.data) for own, now in self._averaged]
        # The optimizer knows where to move its parameters: for the moment, their data is the copy.
        for own, now, _ in trained:
            now.data = own.data
        try:
            for optimizer in self._optimizers:
                optimizer.eval()
        finally:
            for _, now, data in trained:
                now.data = data
            for optimizer in self._optimizers:
                # Not `train()`, which would move the weights.
                for group in optimizer.param_groups:
                    group["train_mode"] = True


def both_skipped(one: Skipped, other: Skipped) -> Skipped:
    """Return whether neither of two updates was made."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one * other  # flags on the device are floats
    if one is False or other is False:
        return False
    return other if one is True else one


def list_norms(module: nn.Module, frozen: Collection[str] = ()) -> list[_BatchNorm]:
    """Return the batch norms with running statistics, without the frozen modules."""
    return [
        part
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.track_running_stats and name not in frozen
    ]


def copy_model(model: nn.Module, name: str) -> nn.Module:
    """Return a copy of a model for an average.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        return deepcopy(model)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"MODEL.{name} needs a copy of the model, and {type(model).__name__} cannot be copied: "
            f"{error}"
        ) from error


@contextmanager
def record_statistics(norms: Sequence[_BatchNorm], found: list[Tensor]) -> Iterator[None]:
    """Let batch norms use the statistics of the batch, and record these; the rest of a model is
    unchanged.

    Args:
        norms: have running statistics, and are in test mode.
        found: gets their means, then their variances, one after the other in one tensor.
    """
    momenta = [norm.momentum for norm in norms]
    # Statistics of this pass replace the old ones (momentum 1), but the number of batches seen is
    # part of the model's state and must not move.
    counters = [counter for norm in norms if (counter := norm.num_batches_tracked) is not None]
    counts = [counter.clone() for counter in counters]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    try:
        yield
        found.append(
            # float64 on the CPU: means over ranks are added in a fixed order there, so that the sum
            # does not depend on the world size.
            torch.cat([statistic.detach().reshape(-1) for statistic in _statistics(norms)])
            .double()
            .cpu()
        )
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.eval()
            norm.momentum = momentum
        for counter, count in zip(counters, counts, strict=True):
            counter.copy_(count)


def set_statistics(norms: Sequence[_BatchNorm], values: Tensor) -> None:
    """Give batch norms statistics in the form in which `record_statistics` has noted them."""
    parts = _statistics(norms)
    for statistic, value in zip(
        parts, torch.split(values, [part.numel() for part in parts]), strict=True
    ):
        statistic.copy_(value.view_as(statistic))


def _statistics(norms: Sequence[_BatchNorm]) -> list[Tensor]:
    parts = [part for norm in norms for part in (norm.running_mean, norm.running_var)]
    return [part for part in parts if part is not None]


def _lerp(averages: list[Tensor], values: list[Tensor], share: float | Tensor) -> None:
    if not averages:
        return
    if not isinstance(share, Tensor):
        torch._foreach_lerp_(averages, values, share)
        return
    # `_foreach_lerp_` takes no weight on the device, and `.item()` would wait for it.
    moves = torch._foreach_sub(values, averages)
    torch._foreach_mul_(moves, share.to(moves[0].device))
    torch._foreach_add_(averages, moves)


def _copy(copies: list[Tensor], values: list[Tensor], share: float | Tensor) -> None:
    if not copies:
        return
    if isinstance(share, Tensor):
        values = [
            torch.where(share.to(own.device) != 0, now, own)
            for own, now in zip(copies, values, strict=True)
        ]
    torch._foreach_copy_(copies, values)


def _length(where: str, duration: float | str, run: RunLength) -> float:
    """Return a duration in updates."""
    try:
        return run.fraction(where, duration) * run.updates
    except ValueError as error:
        raise ConfigError(str(error)) from error
