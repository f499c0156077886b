"""Collation of samples into a batch, if the dataset does not return whole batches itself."""

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
from phasetrain.errors import did_you_mean

Collate = Callable[[Sequence[Any]], Any]
"""Turns N samples, each a pair (input, target), into a pair of batches with first dimension N."""

COLLATES: Registry[Collate] = Registry("collate function", "DATA.*.collate")


@COLLATES.register("stack")
def make_stack() -> Collate:
    """Torch's `default_collate`: tensors of equal shape are stacked, numbers become a tensor."""
    return stack_samples


def stack_samples(samples: Sequence[Any]) -> Any:
    """Return the batch of samples `(input, target)`.

    Raises:
        ValueError: two inputs differ in shape; both are named.
    """
    inputs = [sample[0] for sample in samples]
    try:
        batch = _collate_values(inputs, "inputs")
    except RuntimeError:
        _check_shapes(inputs)
        raise
    return batch, collate_targets([sample[1] for sample in samples])


def _check_shapes(inputs: Sequence[Any]) -> None:
    """Raise ValueError if tensors differ in shape."""
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else None for one in inputs]
    odd = next((at for at, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise ValueError(
            f"sample {odd} of the batch has shape {shapes[odd]}, the first has {shapes[0]}; resize "
            "samples to one shape (a transform such as resize), or set another collate"
        )


@COLLATES.register("list")
def make_list() -> Collate:
    """Stack nothing: input and target of a batch are lists, as detection models expect."""
    return _collect_lists


@COLLATES.register("pad")
def make_pad(
    value: float | Mapping[str, float] = 0.0,
    target_value: float = -100,
    mask: str | None = "mask",
) -> Collate:
    """Pad sequences to the length of the longest one in the batch.

    Args:
        value: padding of inputs; of a mapping also by name, as in `{labels: -100}`, and 0 for the
            others.
        target_value: padding of targets that are sequences; cross entropy ignores -100.
        mask: key of a mask of real elements, bool `(N, L)`, for the model. A tensor input then
            becomes the mapping `{"input": ..., mask: ...}`; None omits the mask.
    """
    return PadCollate(value, target_value, mask)


@dataclass(frozen=True)
class PadCollate:
    """The collate function of `make_pad`."""

    value: float | Mapping[str, float]
    target_value: float
    mask: str | None

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of samples whose inputs are tensors `(L, ...)`, or mappings of tensors
        and numbers.

        Raises:
            ValueError: inputs differ in a dimension other than the first or in their keys, or are
                not tensors; `value` names an input that there is not.
        """
        inputs = [sample[0] for sample in samples]
        targets = [sample[1] for sample in samples]
        if _are_sequences(targets):
            target = self._pad_tensors(targets, "targets", self.target_value)[0]
        else:
            target = collate_targets(targets)
        if not isinstance(inputs[0], Mapping):
            if isinstance(self.value, Mapping):
                raise ValueError(  # noqa: TRY004 - a value of the config
                    f"value = {dict(self.value)}: inputs have no names, expected a number"
                )
            values, mask = self._pad_tensors(inputs, "inputs", self.value)
            return (values if self.mask is None else {"input": values, self.mask: mask}), target
        return self._pad_mapping(inputs), target

    def _pad_mapping(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        by_name = self.value if isinstance(self.value, Mapping) else {}
        for key in by_name:
            if key not in inputs[0]:
                near = did_you_mean(key, inputs[0]) or "."
                raise ValueError(
                    f"value: there is no input {key!r}{near} Inputs are {', '.join(inputs[0])}"
                )
        default = 0.0 if isinstance(self.value, Mapping) else self.value
        for key in inputs[0]:
            values = [one.get(key) for one in inputs]
            if not _are_sequences(values):
                found[key] = _collate_values(values, f"inputs {key!r}")
                continue
            found[key], mask = self._pad_tensors(
                values, f"inputs {key!r}", by_name.get(key, default)
            )
            if self.mask is not None and self.mask not in inputs[0]:
                found.setdefault(self.mask, mask)
        return found

    def _pad_tensors(self, values: Sequence[Any], what: str, value: float) -> tuple[Tensor, Tensor]:
        """Return tensors padded to the longest, and the mask of real elements."""
        if not _are_sequences(values):
            raise ValueError(
                f"{what} are {describe_form(values[0])}, expected tensors of at least one dimension"
            )
        first = values[0]
        odd = next((at for at, one in enumerate(values) if one.shape[1:] != first.shape[1:]), None)
        if odd is not None:
            raise ValueError(
                f"{what}: sample {odd} of the batch has shape {tuple(values[odd].shape)}, the "
                f"first has {tuple(first.shape)}; only the first dimension is padded"
            )
        lengths = torch.tensor([len(one) for one in values])
        return pad_sequence(list(values), batch_first=True, padding_value=value), (
            torch.arange(int(lengths.max())) < lengths[:, None]
        )


def _collect_lists(samples: Sequence[Any]) -> Any:
    return [sample[0] for sample in samples], [sample[1] for sample in samples]


def _are_sequences(values: Sequence[Any]) -> bool:
    return all(isinstance(one, Tensor) and one.ndim > 0 for one in values)


def collate_targets(values: Sequence[Any]) -> Any:
    """Return the targets of a batch; None if no sample has one.

    Raises:
        ValueError: only some samples have one, or they cannot be stacked.
    """
    without = len([value for value in values if value is None])
    if 0 < without < len(values):
        raise ValueError(
            f"{without} of {len(values)} samples have the target None, and the others have one"
        )
    if without:
        return None
    return _collate_values(values, "targets")


def _collate_values(values: Sequence[Any], what: str) -> Any:
    try:
        return default_collate(list(values))
    except TypeError as error:
        kinds = ", ".join(dict.fromkeys(map(describe_form, values)))
        raise ValueError(
            f"{what} are {kinds}: only tensors, arrays, numbers, text, and mappings and lists of "
            "these can be stacked; use a transform that makes tensors (for pictures "
            "torchvision.transforms.v2.functional.pil_to_tensor), or collate=list"
        ) from error


def describe_form(value: Any) -> str:
    """Return types, shapes and keys of a value, which must be equal for all samples of a batch.

    Example:
        >>> describe_form((torch.zeros(1, 8, 8), 3))
        '(float32 (1, 8, 8), int)'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {value.shape}"
    if isinstance(value, Mapping):
        return (
            "{"
            # The order of keys does not matter to collation; by str, because keys may have several
            # types.
            + ", ".join(f"{key}: {describe_form(value[key])}" for key in sorted(value, key=str))
            + "}"
        )
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(describe_form, value)) + ")"
    return type(value).__name__


def find_common_form(values: Iterable[Any]) -> str | None:
    """Return the most frequent form, the earliest one if tied; None without values."""
    # A Counter keeps the order of insertion, and max returns the first of equal counts.
    counts = Counter(map(describe_form, values))
    return max(counts, key=counts.__getitem__, default=None)
