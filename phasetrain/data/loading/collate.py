"""Collation of samples into a batch, if the dataset does not return whole batches itself."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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


class UnequalShapesError(ValueError):
    """Inputs of a batch differ in shape.

    Args:
        difference: two samples and their shapes.
        advice: begins the advice of the message.
        sample: index in the batch of the first one that differs from the first sample.
        shapes: shape of the first sample, and of this one.
    """

    def __init__(
        self,
        difference: str,
        advice: str = "",
        *,
        sample: int | None = None,
        shapes: Sequence[Any] = (),
    ) -> None:
        super().__init__(
            f"{difference}; {advice}resize samples to one shape (a transform such as resize), or "
            "set another collate, for each split: DATA.TRAIN.collate, DATA.TEST.collate, ..."
        )
        self.difference = difference
        self.sample = sample
        self.shapes = tuple(shapes)


@COLLATES.register("stack")
def make_stack() -> Collate:
    """Torch's `default_collate`: tensors of equal shape are stacked, numbers become a tensor."""
    return stack_samples


def stack_samples(samples: Sequence[Any]) -> Any:
    """Return the batch of samples `(input, target)`.

    Raises:
        UnequalShapesError: two inputs differ in shape; both are named.
    """
    batch = _stack_inputs([sample[0] for sample in samples])
    return batch, collate_targets([sample[1] for sample in samples])


def _stack_inputs(inputs: Sequence[Any]) -> Any:
    try:
        return _collate_values(inputs, "inputs")
    except RuntimeError:
        # Only now: comparing the shapes of every batch would cost time in each step.
        _check_shapes(inputs)
        raise


def _check_shapes(inputs: Sequence[Any]) -> None:
    """Raise UnequalShapesError if tensors differ in shape."""
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in inputs]
    odd = next((at for at, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise UnequalShapesError(
            f"sample {odd} of the batch has shape {shapes[odd]}, the first has {shapes[0]}",
            sample=odd,
            shapes=(shapes[0], shapes[odd]),
        )


@COLLATES.register("list")
def make_list() -> Collate:
    """Stack nothing: input and target of a batch are lists, as detection models expect."""
    return _collect_lists


@COLLATES.register("pad")
def make_pad(
    value: float | Mapping[str, float] = 0.0,
    target_value: float | Mapping[str, float] = -100,
    mask: str | None = "mask",
    fields: Sequence[str] | None = None,
    lists: Sequence[str] = (),
) -> Collate:
    """Pad sequences to the length of the longest one in the batch.

    Args:
        value: padding of inputs; of a mapping also by name, as in `{labels: -100}`, and 0 for the
            others.
        target_value: padding of targets that are sequences, in the same forms, and -100 for the
            others; cross entropy ignores -100.
        mask: key of a mask of real elements, bool `(N, L)`, for the model. A tensor input then
            becomes the mapping `{"input": ..., mask: ...}`; None omits the mask. Targets with
            `fields` have one as well, of the first of these fields, under a name that is free.
        fields: names in mappings of inputs and targets that are padded, such as `[boxes, labels]`;
            all others are stacked. None pads every tensor of the inputs.
        lists: names in mappings that become lists, with an entry per sample.

    Raises:
        ValueError: a name is in both `fields` and `lists`.
    """
    if both := set(fields or ()) & set(lists):
        raise ValueError(f"fields and lists: {sorted(both)[0]} is in both; expected it in one")
    padded = None if fields is None else tuple(fields)
    return PadCollate(value, target_value, mask, padded, tuple(lists))


@dataclass(frozen=True)
class PadCollate:
    """The collate function of `make_pad`."""

    value: float | Mapping[str, float]
    target_value: float | Mapping[str, float]
    mask: str | None
    fields: tuple[str, ...] | None = None
    lists: tuple[str, ...] = ()

    def select_names(self, sample: Any) -> "PadCollate":
        """Return the function for inputs like `sample` without targets: the names that only targets
        have are left out of `fields` and `lists`."""
        keys = sample.keys() if isinstance(sample, Mapping) else ()
        fields = None if self.fields is None else tuple(key for key in self.fields if key in keys)
        return replace(self, fields=fields, lists=tuple(key for key in self.lists if key in keys))

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of samples whose inputs are tensors `(L, ...)`, or mappings of tensors
        and numbers.

        Raises:
            ValueError: inputs differ in a dimension other than the first or in their keys, or are
                not tensors; `value` names an input that there is not.
        """
        inputs = [sample[0] for sample in samples]
        targets = [sample[1] for sample in samples]
        self._check_names(inputs[0], targets[0])
        if isinstance(targets[0], Mapping) and (self.fields or self.lists):
            target: Any = self._pad_mapping(targets, "targets", self.target_value, -100.0)
        elif _are_sequences(targets) and self.fields is None:
            if isinstance(self.target_value, Mapping):
                raise ValueError(
                    f"target_value = {dict(self.target_value)}: targets have no names, expected a "
                    "number"
                )
            target = self._pad_tensors(targets, "targets", self.target_value)[0]
        else:
            target = collate_targets(targets)
        if not isinstance(inputs[0], Mapping) and self.fields is not None:
            return _stack_inputs(inputs), target
        if not isinstance(inputs[0], Mapping):
            if isinstance(self.value, Mapping):
                raise ValueError(  # noqa: TRY004 - a value of the config
                    f"value = {dict(self.value)}: inputs have no names, expected a number"
                )
            values, mask = self._pad_tensors(inputs, "inputs", self.value)
            return (values if self.mask is None else {"input": values, self.mask: mask}), target
        return self._pad_mapping(inputs, "inputs", self.value, 0.0), target

    def _check_names(self, first: Any, target: Any) -> None:
        """Reject names of `fields` and `lists` that a sample does not have."""
        names = [name for side in (first, target) if isinstance(side, Mapping) for name in side]
        for name in (*(self.fields or ()), *self.lists):
            if name not in names:
                near = did_you_mean(name, names) or "."
                raise ValueError(
                    f"there is no field {name!r} in inputs or targets{near} There are "
                    f"{', '.join(names) or 'none, since neither is a mapping'}"
                )

    def _pad_mapping(
        self,
        samples: Sequence[Mapping[str, Any]],
        what: str,
        value: float | Mapping[str, float],
        default: float,
    ) -> dict[str, Any]:
        """Return the batch of mappings; `default` pads the entries that `value` does not name."""
        batch: dict[str, Any] = {}
        by_name = value if isinstance(value, Mapping) else {}
        for key in by_name:
            if key not in samples[0]:
                near = did_you_mean(key, samples[0]) or "."
                raise ValueError(
                    f"value: there is no {what[:-1]} {key!r}{near} {what.capitalize()} are "
                    f"{', '.join(samples[0])}"
                )
        if not isinstance(value, Mapping):
            default = value
        masks: dict[str, Tensor] = {}
        for key in samples[0]:
            values = [sample.get(key) for sample in samples]
            if key in self.lists:
                batch[key] = values
            elif not self._pads(key, values):
                batch[key] = _collate_values(values, f"{what} {key!r}", key)
            else:
                padding = by_name.get(key, default)
                batch[key], masks[key] = self._pad_tensors(values, f"{what} {key!r}", padding)
        if self.fields is not None and masks and self.mask in samples[0]:
            raise ValueError(
                f"mask = {self.mask!r}: the {what} have a field of that name; set another name for "
                "the mask of real elements, such as real, or null"
            )
        if self.mask is not None and self.mask not in samples[0] and masks:
            ordered = [name for name in self.fields or masks if name in masks]
            batch[self.mask] = masks[ordered[0]]
        return batch

    def _pads(self, key: str, values: Sequence[Any]) -> bool:
        """Return whether the values of a field are padded."""
        if self.fields is None:
            return _are_sequences(values)
        return key in self.fields

    def _pad_tensors(self, values: Sequence[Any], what: str, value: float) -> tuple[Tensor, Tensor]:
        """Return tensors padded to the longest, and the mask of real elements."""
        if not _are_sequences(values):
            raise ValueError(
                f"{what} are {describe_form(values[0])}, expected tensors of at least one dimension"
            )
        first = values[0]
        odd = next(
            (at for at, tensor in enumerate(values) if tensor.shape[1:] != first.shape[1:]), None
        )
        if odd is not None:
            raise ValueError(
                f"{what}: sample {odd} of the batch has shape {tuple(values[odd].shape)}, the "
                f"first has {tuple(first.shape)}; only the first dimension is padded"
            )
        lengths = torch.tensor([len(tensor) for tensor in values])
        return pad_sequence(list(values), batch_first=True, padding_value=value), (
            torch.arange(int(lengths.max())) < lengths[:, None]
        )


def _collect_lists(samples: Sequence[Any]) -> Any:
    return [sample[0] for sample in samples], [sample[1] for sample in samples]


def _are_sequences(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) and value.ndim > 0 for value in values)


def collate_targets(values: Sequence[Any]) -> Any:
    """Return the targets of a batch; None if no sample has one.

    Raises:
        ValueError: only some samples have one, or they cannot be stacked, for example because they
            differ in shape.
    """
    without = len([value for value in values if value is None])
    if 0 < without < len(values):
        raise ValueError(
            f"{without} of {len(values)} samples have the target None, and the others have one"
        )
    if without:
        return None
    try:
        return _collate_values(values, "targets")
    except RuntimeError as error:
        kinds = ", ".join(dict.fromkeys(map(describe_form, values)))
        raise ValueError(
            f"targets differ in shape ({kinds}); set collate=pad without `fields`, which pads a "
            "target without a name, or collate=list, or return the target as a mapping and name "
            "its entry in `fields`"
        ) from error


def _collate_values(values: Sequence[Any], what: str, field: str | None = None) -> Any:
    if field is not None:
        _check_field(values, what, field)
    elif isinstance(values[0], Mapping):
        for name in values[0]:
            _check_field([mapping.get(name) for mapping in values], f"{what} {name!r}", name)
    try:
        return default_collate(list(values))
    except TypeError as error:
        kinds = ", ".join(dict.fromkeys(map(describe_form, values)))
        raise ValueError(
            f"{what} are {kinds}: only tensors, arrays, numbers, text, and mappings and lists of "
            "these can be stacked; use a transform that makes tensors (for pictures "
            "torchvision.transforms.v2.functional.pil_to_tensor), or collate=list"
        ) from error


def _check_field(values: Sequence[Any], what: str, field: Any) -> None:
    """Raise ValueError if tensors of a named field differ in shape."""
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in values]
    odd = next((at for at, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None and None not in shapes:
        raise ValueError(
            f"{what}: sample {odd} of the batch has shape {shapes[odd]}, the first has "
            f"{shapes[0]}; for fields of variable length set collate={{name: pad, fields: "
            f"[{field}]}}, or lists: [{field}]; or resize them to one shape"
        )


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
