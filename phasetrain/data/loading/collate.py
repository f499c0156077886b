"""How samples become a batch, where the data set does not give whole batches itself."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from phasetrain.config.registry import Registry

Collate = Callable[[Sequence[Any]], Any]
"""Makes of N samples, each a pair (input, target), one pair of batches with first dimension N."""

COLLATES: Registry[Collate] = Registry("collate function", "DATA.*.collate")


@COLLATES.register("stack")
def stack() -> Collate:
    """Return torch's `default_collate`: tensors of equal shape are stacked, numbers become a
    tensor."""
    return stacked


def stacked(samples: Sequence[Any]) -> Any:
    """Return the batch of samples `(input, target)`.

    Raises:
        ValueError: two inputs have different shapes; both are named.
    """
    first = samples[0][0]
    if isinstance(first, torch.Tensor):
        odd = next((i for i, sample in enumerate(samples) if sample[0].shape != first.shape), None)
        if odd is not None:
            raise ValueError(
                f"sample {odd} of the batch has shape {tuple(samples[odd][0].shape)}, the first has "
                f"{tuple(first.shape)}; bring all samples to one shape (a transform such as resize), or set another "
                "collate"
            )
    return _one([sample[0] for sample in samples], "inputs"), _targets(
        [sample[1] for sample in samples]
    )


@COLLATES.register("list")
def listed() -> Collate:
    """Return a collate function that stacks nothing: input and target of a batch are lists, as
    detectors take them."""
    return _lists


@COLLATES.register("pad")
def pad(value: float = 0.0, target_value: float = -100, mask: str | None = "mask") -> Collate:
    """Return a collate function that fills sequences up to the longest one of the batch.

    Args:
        value: what inputs are filled up with.
        target_value: what targets that are sequences are filled up with; cross-entropy ignores
            -100.
        mask: key under which the model gets where inputs are real, bool `(N, L)`. An input that is
            a tensor then becomes the mapping `{"input": ..., mask: ...}`; None leaves the mask out.
    """
    return Padded(value, target_value, mask)


@dataclass(frozen=True)
class Padded:
    """See `pad`."""

    value: float
    target_value: float
    mask: str | None

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of samples whose inputs are tensors `(L, ...)`, or mappings of such and
        of numbers.

        Raises:
            ValueError: inputs differ in another dimension than the first, or in their keys, or are
                no tensors.
        """
        inputs = [sample[0] for sample in samples]
        targets = [sample[1] for sample in samples]
        if _sequences(targets):
            target = self._filled(targets, "targets", self.target_value)[0]
        else:
            target = _targets(targets)
        if not isinstance(inputs[0], Mapping):
            values, mask = self._filled(inputs, "inputs", self.value)
            return (values if self.mask is None else {"input": values, self.mask: mask}), target
        return self._mapping(inputs), target

    def _mapping(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in inputs[0]:
            values = [one.get(key) for one in inputs]
            if not _sequences(values):
                found[key] = _one(values, f"inputs {key!r}")
                continue
            found[key], mask = self._filled(values, f"inputs {key!r}", self.value)
            if self.mask is not None and self.mask not in inputs[0]:
                found.setdefault(self.mask, mask)
        return found

    def _filled(self, values: Sequence[Any], what: str, value: float) -> tuple[Tensor, Tensor]:
        """Return tensors filled up to the longest, and where they are real."""
        if not _sequences(values):
            raise ValueError(
                f"{what} are {form(values[0])}, expected tensors of at least one dimension"
            )
        first = values[0]
        odd = next((at for at, one in enumerate(values) if one.shape[1:] != first.shape[1:]), None)
        if odd is not None:
            raise ValueError(
                f"{what}: sample {odd} of the batch has shape {tuple(values[odd].shape)}, the first has "
                f"{tuple(first.shape)}; only the first dimension is filled up"
            )
        lengths = torch.tensor([len(one) for one in values])
        return pad_sequence(list(values), batch_first=True, padding_value=value), (
            torch.arange(int(lengths.max())) < lengths[:, None]
        )


def _lists(samples: Sequence[Any]) -> Any:
    return [sample[0] for sample in samples], [sample[1] for sample in samples]


def _sequences(values: Sequence[Any]) -> bool:
    return all(isinstance(one, Tensor) and one.ndim > 0 for one in values)


def _targets(values: Sequence[Any]) -> Any:
    """Return the targets of a batch; None where no sample has one."""
    without = sum(value is None for value in values)
    if 0 < without < len(values):
        raise ValueError(
            f"{without} of {len(values)} samples have the target None, and the others have one"
        )
    if without:
        return None
    return _one(values, "targets")


def _one(values: Sequence[Any], what: str) -> Any:
    try:
        return default_collate(list(values))
    except TypeError as error:
        kinds = ", ".join(dict.fromkeys(map(form, values)))
        raise ValueError(
            f"{what} are {kinds}: what is stacked are tensors, arrays, numbers, text, and mappings and lists of them; "
            "let a transform make tensors (of pictures torchvision.transforms.v2.functional.pil_to_tensor), or set "
            "collate=list, which stacks nothing"
        ) from error


def form(value: Any) -> str:
    """Return in words what `stacked` needs to be equal in all samples: types, shapes and keys.

    Example:
        >>> form((torch.zeros(1, 8, 8), 3))
        '(float32 (1, 8, 8), int)'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {value.shape}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {form(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(form, value)) + ")"
    return type(value).__name__


def common_form(values: Iterable[Any]) -> str | None:
    """Return the form of most values, of equally frequent ones the earliest; None where there are
    no values."""
    counts = Counter(map(form, values))
    return max(counts, key=counts.__getitem__, default=None)
