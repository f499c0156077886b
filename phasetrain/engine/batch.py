"""The input of a step, a batch, and its output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phasetrain.errors import did_you_mean
from phasetrain.runtime.nested import map_tensors

IGNORED = -100
"""Class of targets that do not count by default: `ignore_index` of torch's cross entropy."""


@dataclass(slots=True)
class Batch:
    """A micro-batch of one rank.

    Attributes:
        input: input of the model, first dimension N; a tensor, or a nested list, tuple or dict of
            tensors.
        target: target of the loss, first dimension N; None if the data has no targets.
        ids: indices of the samples in their dataset, int64 `(N,)`, on the CPU; empty if none
            counts.
        size: N, the number of samples; 0 if none counts.
        mask: True where a sample counts, bool `(N,)`; None means that all do. A rank that
            has run out of samples gets a fully masked padding batch, so that all ranks run the
            same number of forward passes.
        bad: index and reason of each sample that could not be read while the batch was made; see
            `DATA.*.on_bad_sample`.
        weight: its weight in an update, for a task that counts tokens instead of samples; None:
            its size.
        position: position of a dataset that is read forward after its last sample; None: the
            dataset saves none.
    """

    input: Any
    target: Any
    ids: Tensor
    size: int
    mask: Tensor | None = None
    bad: tuple[tuple[int, str], ...] = ()
    weight: float | None = None
    position: Any = None

    def as_padding(self) -> "Batch":
        """Return the batch with none of its samples counting."""
        # The samples stay in it, because layers such as batch norm need an input of the usual
        # shape.
        mask = torch.zeros(self.size, dtype=torch.bool)
        return Batch(self.input, self.target, self.ids[:0], 0, mask)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`; `ids` stay on the CPU."""
        # `non_blocking` overlaps the copy of pinned memory with computation. A copy to the CPU has
        # to be complete: the caller may read it at once.
        non_blocking = device.type != "cpu"
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; torch's loader calls it where `pin_memory` is
        set."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(
            input=map_tensors(self.input, change),
            target=map_tensors(self.target, change),
            ids=self.ids,
            size=self.size,
            mask=map_tensors(self.mask, change),
            bad=self.bad,
            weight=self.weight,
            position=self.position,
        )


@dataclass(slots=True)
class StepOutput:
    """The output of one step.

    Attributes:
        loss: mean over the step's samples (or tokens), a scalar tensor on the model's device.
        weight: number of samples, or of tokens, in the mean.
        samples: number of samples of the step on this rank.
        output: the model's output; None in `on_step`.
        target: the target; None in `on_step`.
        mask: see `Batch.mask`.
        ids: see `Batch.ids`; None if the `forward` of a custom task leaves it out.
        logs: named scalars (tensors without graph, or floats) that a part wants in the log.
    """

    loss: Tensor
    weight: float
    samples: int
    output: Any = None
    target: Any = None
    mask: Tensor | None = None
    ids: Tensor | None = None
    logs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class SequenceOutput(StepOutput):
    """The output of a step that also decodes, for error rates of sequences.

    Attributes:
        decoded: decoded tokens without their end, int64 `(N, L)`, padded with -100; None in
            training, and if no meter needs them.
        references: the sequences that are right, int64 `(N, R, T)`, without their end, padded with
            -100; a sample with fewer than R repeats its first one.
    """

    decoded: Tensor | None = None
    references: Tensor | None = None


@dataclass(slots=True)
class GeneratedOutput(StepOutput):
    """The output of a step that generates a sample for each real one.

    Attributes:
        images: generated images `(N, C, H, W)`, which a report shows instead of the inputs; None:
            the samples are not images.
        features: features `(N, D)` of the generated samples.
        real_features: features `(N, D)` of the real samples.
    """

    images: Tensor | None = None
    features: Tensor | None = None
    real_features: Tensor | None = None


def entry(value: Any, key: str | int | None, where: str) -> Any:
    """Return an entry of a mapping or a list of outputs or targets; without a key, all of it.

    Raises:
        ValueError: there is no such entry; the message has `where`, the config key that asks for
            it.
    """
    if key is None:
        return value
    if isinstance(value, Mapping) and key in value:
        return value[key]
    if isinstance(value, list | tuple) and isinstance(key, int) and 0 <= key < len(value):
        return value[key]
    if isinstance(value, Mapping):
        there = (
            f"there are {', '.join(map(str, value))}{did_you_mean(str(key), list(map(str, value)))}"
        )
    elif isinstance(value, list | tuple):
        there = f"there are {len(value)}, numbered from 0"
    else:
        there = f"it is one {type(value).__name__}, without entries; leave {where} out"
    raise ValueError(f"{where} = {key!r}: no such entry; {there}")
