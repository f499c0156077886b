"""The policy for updates whose loss or gradient is not finite (OPTIMIZER.on_nonfinite)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from phasetrain.config.engines import list_engines
from phasetrain.distributed import Strategy, World
from phasetrain.engine.batch import Batch
from phasetrain.engine.position import Position
from phasetrain.optim.update.gradients import has_nonfinite
from phasetrain.runtime.format import join_first
from phasetrain.runtime.nested import list_tensors

OnNonFinite = Literal["stop", "skip", "ignore"]

MAX_NAMES = 10
"""Names of gradients that a message lists."""

MAX_IDS = 5
"""Sample ids that a message lists."""

CLEAN_DATA = "remove or replace these values in the dataset or by a transform"
"""Advice where input or target of a sample is not finite."""


@dataclass(frozen=True)
class GuardSettings:
    """How updates that are not finite are handled.

    The builder reads the fields that have the name of a key of OPTIMIZER.

    Attributes:
        on_nonfinite: stop the run, skip the update, or ignore it without checking.
        skip_budget: maximum number of updates skipped in a row before the run fails; includes
            those that a gradient scaler skips.
        names: names of the trained parameters in the optimizer's order, for messages; empty if
            unknown.
        buffers: returns the tensors that a forward pass changes (running statistics, queues). It is
            called each time, because a module may replace them; a skipped update restores them.
        lag: 0 reads the verdict before the optimizer steps. 1 lets the device withhold the update
            and reads the verdict one update later, so that nothing waits for the device. None: 1 on
            CUDA if the optimizer or the scaler supports it.
    """

    on_nonfinite: OnNonFinite = "stop"
    skip_budget: int = 20
    names: Sequence[str] = ()
    buffers: Callable[[], Sequence[Tensor]] = list
    lag: int | None = None


STOP = GuardSettings()


@dataclass
class NonFinite:
    """An update that was not made because its loss or gradient was not finite.

    Attributes:
        loss: mean over the update's samples, without the scaler's factor.
        gradients: names of parameters whose gradient is not finite, at most 10; None if the
            gradients were gone by the time the device reported.
        in_row: updates skipped in a row, including this one.
        scale: gradient scale after this update; None without a scaler.
        stops: whether the run fails because of it.
        updates: number of the update in the run, counted from 1 as in metrics.jsonl; 0 if unknown.
        split, step, where: position of the update, see `phasetrain.tasks.Position`.
        ids: indices of its samples in their dataset.
        bad_inputs, bad_targets: indices of the ones whose input or target is not finite.
        weightless: whether `weight_of` gave one of its micro-batches with samples the weight 0.
        dump: folder to which a hook has written the step, or empty.
    """

    loss: float
    gradients: tuple[str, ...] | None
    in_row: int
    scale: float | None = None
    stops: bool = False
    updates: int = 0
    split: str = ""
    step: int = 0
    where: float = 0.0
    ids: tuple[int, ...] = ()
    dump: str = ""
    bad_inputs: tuple[int, ...] = ()
    bad_targets: tuple[int, ...] = ()
    weightless: bool = False

    @property
    def has_bad_data(self) -> bool:
        """Whether the data itself is not finite, so that no other setting would help."""
        return bool(self.bad_inputs or self.bad_targets)

    def locate(self, batches: Sequence[Batch], at: Position, world: World) -> None:
        """Fill in position and samples of the update; all ranks must call this.

        The message of rank 0 must name the sample that only another rank has seen.

        Args:
            batches: micro-batches of this rank.
            at: position of the update.
            world: ranks of the run.
        """
        self.updates = at.updates + 1
        self.split = at.split
        self.step = at.step
        self.where = at.where
        has_none = any(batch.size and batch.weight == 0 for batch in batches)
        self.weightless = any(world.all_gather(has_none))
        own = [
            (
                batch.ids.tolist(),
                list_nonfinite_ids(batch.input, batch.ids),
                list_nonfinite_ids(batch.target, batch.ids),
            )
            for batch in batches
        ]
        every = [batch for rank in world.all_gather(own) for batch in rank]
        self.ids = tuple(number for ids, _, _ in every for number in ids)
        self.bad_inputs = tuple(number for _, ids, _ in every for number in ids)
        self.bad_targets = tuple(number for _, _, ids in every for number in ids)

    def __str__(self) -> str:
        """Return update, loss, gradients and samples as the beginning of a sentence."""
        update = "an update"
        if self.updates:
            update = f"update {self.updates}"
        samples = ""
        if self.ids:
            samples = f"; samples {join_first(self.ids, MAX_IDS)}"
        for name, bad in (("input", self.bad_inputs), ("target", self.bad_targets)):
            if bad:
                samples += (
                    f"; the {name} has NaN or infinite values in {len(bad)} of {len(self.ids)} "
                    f"samples: {join_first(bad, MAX_IDS)}"
                )
        return f"{update} is not finite (loss {self.loss!r}; {self._describe_gradients()}{samples})"

    def _describe_gradients(self) -> str:
        if self.gradients is None:
            return "its gradients were not saved"
        if self.gradients:
            return f"gradients of {', '.join(self.gradients)}"
        if isfinite(self.loss):
            return "every gradient is finite, but their norm is not"
        return "every gradient is finite"


def format_error(found: NonFinite, settings: GuardSettings) -> str:
    """Return the message of the error that ends a run after an update that is not finite."""
    hint = ""
    if found.dump:
        hint = f"; the step is saved in {found.dump}"
    if found.updates and "replay" in list_engines():
        hint += f"; inspect it with RUN.engine=replay RUN.step={found.updates}"
    if found.weightless:
        hint += (
            "; a micro-batch has the weight 0, by `weight_of` of the task: a loss that divides by "
            "it is NaN, so let it divide by at least a small number"
        )
    if settings.on_nonfinite == "stop" and found.scale is None:
        advice = (
            "Lower OPTIMIZER.lr or set OPTIMIZER.clip_norm; to skip such updates, set "
            "OPTIMIZER.on_nonfinite=skip and RUN.allow=OPTIMIZER.on_nonfinite"
        )
        if found.has_bad_data:
            advice = f"To go on, {CLEAN_DATA}"
        return (
            f"OPTIMIZER.on_nonfinite = 'stop': {found}; the weights are those before the "
            f"update{hint}. {advice}"
        )
    scale = ""
    if found.scale is not None:
        scale = f", and the gradient scale has fallen to {found.scale:g}"
    advice = (
        "Fix the data, lower OPTIMIZER.lr or clip the gradients; with a higher "
        "OPTIMIZER.skip_budget the run resumes from the last checkpoint"
    )
    if found.has_bad_data:
        advice = f"To go on, {CLEAN_DATA}"
    return (
        f"OPTIMIZER.skip_budget = {settings.skip_budget}: {found.in_row} updates in a row were "
        f"skipped{scale}; the last one: {found}{hint}. {advice}"
    )


def list_nonfinite_ids(value: Any, ids: Tensor) -> list[int]:
    """Return the ids of the samples with NaN or infinite values, in their order.

    Args:
        value: input or target of a batch; tensors without a first dimension of N are not checked.
        ids: ids of its samples, int64 `(N,)`, on the CPU.
    """
    bad = torch.zeros(len(ids), dtype=torch.bool)
    for mark in mark_nonfinite(value, len(ids)):
        bad.logical_or_(mark.cpu())
    return ids[bad].tolist()


def mark_nonfinite(value: Any, size: int) -> list[Tensor]:
    """Return for each tensor of a batch whether a sample has NaN or infinite values, bool `(N,)` on
    its device.

    Args:
        value: input, target or both; tensors without a first dimension of N are left out.
        size: N.
    """
    return [
        ~tensor.isfinite().reshape(size, -1).all(dim=1)
        for tensor in list_tensors(value)
        # isfinite takes neither sparse nor nested tensors.
        if tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_floating_point()
        and tensor.ndim
        and len(tensor) == size > 0
    ]


def name_nonfinite(
    parameters: Sequence[Tensor], names: Sequence[str], strategy: Strategy
) -> tuple[str, ...]:
    """Return the names of parameters whose gradient is not finite; every rank must call this.

    Args:
        parameters: trained parameters in order.
        names: their names; those missing are numbered.
        strategy: how ranks share an update.
    """
    bad = [
        number
        for number, parameter in enumerate(parameters)
        if parameter.grad is not None and has_nonfinite(parameter.grad)
    ]
    if strategy.shards_optimizer:
        # Each rank sees only its shards, and the message has to name the same weights on all ranks.
        gathered = strategy.world.all_gather(bad)
        bad = sorted({number for numbers in gathered for number in numbers})
    return tuple(
        names[number] if number < len(names) else f"parameter {number}"
        for number in bad[:MAX_NAMES]
    )
