"""The example of a packed model: samples, and the output that they must give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.addons.deploy.pack.archive import EXAMPLE_TENSORS, EXAMPLE_TREE
from phasetrain.checkpoint.codec import decode, encode
from phasetrain.config.nested import to_plain
from phasetrain.errors import ConfigError, InvalidCheckpointError
from phasetrain.proof.compare import differences

TOLERANCES = MappingProxyType({"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2})
"""Precision of the forward pass -> maximum difference between the outputs of two machines, relative
to the largest absolute value of the output."""

KIND = "kind"
VALUE = "value"


@dataclass(frozen=True)
class Example:
    """Samples and their output.

    Attributes:
        samples: as the dataset gives them, before the transforms.
        output: output of the model for them, on the CPU.
    """

    samples: Sequence[Any]
    output: Any

    def encode(self) -> dict[str, bytes]:
        """Return name -> content of its files.

        Raises:
            ConfigError: a sample or the output is more than tensors, arrays, pictures, numbers,
                texts, and mappings and lists of them.
        """
        try:
            samples = [_to_storable(sample) for sample in self.samples]
            tree, tensors = encode({"samples": samples, "output": self.output})
        except TypeError as error:
            raise ConfigError(
                f"the example cannot be packed: {error}; expected tensors, arrays, pictures, "
                "numbers, texts, and mappings and lists of them",
                code="pack.unsupported",
            ) from error
        return {EXAMPLE_TREE: tree, EXAMPLE_TENSORS: tensors}

    @classmethod
    def decode(cls, tree: memoryview, tensors: memoryview) -> "Example":
        """Return the example in two files.

        Raises:
            InvalidCheckpointError: they are malformed.
        """
        content = decode(bytes(tree), bytearray(tensors))
        if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
            raise InvalidCheckpointError("the example has no samples")
        return cls([_from_storable(entry) for entry in content["samples"]], content.get("output"))


@dataclass(frozen=True)
class Verification:
    """How an output compares with the expected one.

    Attributes:
        identical: whether all bits are equal.
        difference: largest absolute difference; infinite if the outputs differ in form.
        limit: largest difference that counts as equal.
    """

    identical: bool
    difference: float
    limit: float

    @property
    def is_equal(self) -> bool:
        """Whether the outputs are equal within the tolerance."""
        return self.identical or self.difference <= self.limit

    def describe(self) -> str:
        """Return the result in words."""
        if self.identical:
            return "bit-identical"
        return f"largest difference {self.difference:.2g}, allowed {self.limit:.2g}"


def compare_outputs(expected: Any, actual: Any, tolerance: float) -> Verification:
    """Compare two outputs of a model.

    Args:
        expected, actual: tensors, or mappings and lists of them.
        tolerance: relative to the largest absolute value in `expected`.
    """
    if not differences(expected, actual):
        return Verification(identical=True, difference=0.0, limit=0.0)
    pairs = list(_pair_tensors(expected, actual))
    if any(pair is None for pair in pairs):
        return Verification(identical=False, difference=float("inf"), limit=0.0)
    # The largest value of all tensors, so that small outputs next to large ones may be off by as
    # much as rounding makes them.
    difference = 0.0
    largest = 0.0
    for pair in pairs:
        assert pair is not None, "checked above"
        expected_values, actual_values = (tensor.double() for tensor in pair)
        # Masks of attention are infinite, and a difference of infinities is not a number.
        finite = expected_values.isfinite() & actual_values.isfinite()
        if not torch.equal(
            expected_values[~finite].nan_to_num(), actual_values[~finite].nan_to_num()
        ):
            difference = float("inf")
        if finite.any():
            difference = max(
                difference, float((expected_values - actual_values)[finite].abs().max())
            )
            largest = max(largest, float(expected_values[finite].abs().max()))
    return Verification(identical=False, difference=difference, limit=tolerance * largest)


def _pair_tensors(expected: Any, actual: Any) -> list[tuple[Tensor, Tensor] | None]:
    """Return the tensors at the same places of two outputs; None where they differ in form."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
            return [None]
        return [(expected, actual)]
    if (
        isinstance(expected, Mapping)
        and isinstance(actual, Mapping)
        and expected.keys() == actual.keys()
    ):
        return [pair for key in expected for pair in _pair_tensors(expected[key], actual[key])]
    if (
        isinstance(expected, list | tuple)
        and isinstance(actual, list | tuple)
        and len(expected) == len(actual)
    ):
        pairs = zip(expected, actual, strict=True)
        return [pair for items in pairs for pair in _pair_tensors(*items)]
    if isinstance(expected, float) and isinstance(actual, float):
        return [(torch.tensor(expected), torch.tensor(actual))]
    # Texts, and whole numbers such as counts, have no tolerance.
    if type(expected) is type(actual) and expected == actual:
        return []
    return [None]


def to_plain_output(value: Any) -> Any:
    """Return an output of a model as tensors on the CPU, plain dicts and lists."""

    def to_cpu(leaf: Any) -> Any:
        return leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else leaf

    return to_plain(value, to_cpu, text_keys=True)


def _to_storable(sample: Any) -> dict[str, Any]:
    """Return a sample in a form that the codec can write, with its kind."""
    if isinstance(sample, Tensor):
        # A copy: a row of a dataset would otherwise be a view, and tv_tensors are subclasses.
        return {KIND: "tensor", VALUE: sample.as_subclass(Tensor).detach().cpu().clone()}
    if isinstance(sample, np.ndarray):
        return {KIND: "array", VALUE: torch.from_numpy(np.ascontiguousarray(sample).copy())}
    if sample is None or isinstance(sample, str | bool | int | float | np.generic):
        return {KIND: "plain", VALUE: sample}
    if isinstance(sample, Mapping):
        return {KIND: "mapping", VALUE: {key: _to_storable(value) for key, value in sample.items()}}
    if isinstance(sample, tuple):
        return {KIND: "tuple", VALUE: [_to_storable(value) for value in sample]}
    if isinstance(sample, list):
        return {KIND: "list", VALUE: [_to_storable(value) for value in sample]}
    # Pillow is optional, and a picture can only be here if it is installed.
    from PIL.Image import Image

    if isinstance(sample, Image) and sample.mode in ("L", "RGB", "RGBA"):
        pixels = torch.from_numpy(np.array(sample))
        return {KIND: "picture", VALUE: pixels, "mode": sample.mode}
    raise TypeError(f"a sample has the type {type(sample).__name__}")


def _from_storable(entry: Any) -> Any:
    if not isinstance(entry, Mapping) or VALUE not in entry:
        raise InvalidCheckpointError("a sample of the example is malformed")
    sample_kind = entry.get(KIND)
    value = entry[VALUE]
    if sample_kind in ("tensor", "plain"):
        return value
    if sample_kind == "array" and isinstance(value, Tensor):
        return value.numpy()
    if sample_kind == "mapping" and isinstance(value, Mapping):
        return {key: _from_storable(inner) for key, inner in value.items()}
    if sample_kind == "list" and isinstance(value, list):
        return [_from_storable(inner) for inner in value]
    if sample_kind == "tuple" and isinstance(value, list):
        return tuple(_from_storable(inner) for inner in value)
    if sample_kind == "picture" and isinstance(value, Tensor):
        from PIL import Image

        return Image.fromarray(value.numpy(), mode=entry.get("mode"))
    raise InvalidCheckpointError(f"a sample of the example is of the unknown kind {sample_kind!r}")
