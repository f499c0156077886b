"""The registry of datasets (`dataset` in section DATA.*), and the base class of datasets in
memory."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.config.registry import Registry
from phasetrain.data.protocols import Samples
from phasetrain.proof.digest import hash_tensors

DATASETS: Registry[Samples] = Registry("dataset", "DATA.*")


LABEL = "label"
"""Name of the class among the targets of samples with groupings."""


class Role(str):
    """The purpose of a split, `train` or `test`: a fact for datasets whose config names no
    split."""

    __slots__ = ()


def locate_part(begins: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Return which of several parts has an index, and the index within the part.

    Args:
        begins: index at which each part begins, and the end of the last one.
        index: index in all of them.
    """
    # Python integers: some datasets reject NumPy integers as an index.
    part = int(np.searchsorted(begins, index, side="right")) - 1
    return part, index - int(begins[part])


class TensorSamples(Dataset[tuple[Tensor, Any]]):
    """A dataset in memory of inputs and classes, indexed by whole batches; it draws no random
    numbers.

    Args:
        inputs: `(N, ...)`, any type.
        targets: class of each sample, `(N,)`.
        classes: number of classes; None: as many as class_names, or without them one more than the
            largest target.
        class_names: one name per class; None uses the numbers.
        groupings: name -> group of each class, int64 `(classes,)`. The targets are then mappings:
            `label` -> class, and each name -> group.
        input_columns: name of each entry of inputs `(N, D)` that are rows of a table.

    Raises:
        ValueError: there are no samples, the lengths differ, a grouping has not one group per
            class, or there are more or fewer names than columns.
    """

    # Of the class, for subclasses with a constructor of their own.
    groupings: Mapping[str, Tensor] = MappingProxyType({})
    input_columns: tuple[str, ...] = ()

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        classes: int | None = None,
        class_names: Sequence[str] | None = None,
        groupings: Mapping[str, Sequence[int]] | None = None,
        input_columns: Sequence[str] = (),
    ) -> None:
        if targets.ndim != 1 or len(inputs) != len(targets):
            raise ValueError(
                f"{len(inputs)} inputs need a class each, targets of shape ({len(inputs)},), not "
                f"{tuple(targets.shape)}; for other targets, such as those of a regression, use "
                "torch.utils.data.TensorDataset"
            )
        if len(targets) == 0:
            raise ValueError("the dataset has no samples")
        self.inputs = inputs
        self.targets = targets
        largest = int(targets.max()) + 1
        # A split may lack the last classes.
        self.classes = max(largest, len(class_names or ())) if classes is None else classes
        self.class_names = tuple(class_names or map(str, range(self.classes)))
        if len(self.class_names) != self.classes:
            raise ValueError(
                f"{self.classes} classes need as many class_names, not {len(self.class_names)}"
            )
        self.groupings = {
            name: torch.tensor([*groups], dtype=torch.int64)
            for name, groups in (groupings or {}).items()
        }
        for name, groups in self.groupings.items():
            if name == LABEL or len(groups) != self.classes or groups.min() < 0:
                raise ValueError(
                    f"groupings.{name} = {groups.tolist()}: expected a group from 0 for each of "
                    f"the {self.classes} classes, and another name than {LABEL}"
                )

        self.input_columns = tuple(input_columns)
        if input_columns and tuple(inputs.shape[1:]) != (len(input_columns),):
            raise ValueError(
                f"inputs of shape {tuple(inputs.shape[1:])} do not have the "
                f"{len(input_columns)} input_columns {', '.join(input_columns)}"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.inputs[index], self._add_groups(self.targets[index])

    def __getitems__(self, indices: Tensor) -> tuple[Tensor, Any]:
        """Return the batch `(inputs, targets)` at int64 `indices` `(B,)`: shapes `(B, ...)` and
        `(B,)`."""
        # index_select is about twice as fast as indexing by a tensor.
        targets: Any = self.targets.index_select(0, indices)
        if self.groupings:
            targets = self._add_groups(targets)
        return self.inputs.index_select(0, indices), targets

    def _add_groups(self, targets: Tensor) -> Any:
        if not self.groupings:
            return targets
        groups = {name: table[targets] for name, table in self.groupings.items()}
        return {LABEL: targets, **groups}

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            ValueError: the targets are floats.
        """
        if self.targets.is_floating_point():
            raise ValueError(
                f"the targets are {str(self.targets.dtype).removeprefix('torch.')}; classes are "
                "integers"
            )
        return self.targets.numpy().astype(np.int64, copy=False)

    def facts(self) -> Mapping[str, Any]:
        """Return `classes`, `class_names`, `input_shape` and, if there are any, `channels` of
        `(C, H, W)` inputs and `input_columns`."""
        shape = tuple(self.inputs.shape[1:])
        facts: dict[str, Any] = {
            "classes": self.classes,
            "class_names": self.class_names,
            "input_shape": shape,
        }
        if len(shape) == 3:
            facts["channels"] = shape[0]
        if self.input_columns:
            facts["input_columns"] = self.input_columns
        return facts

    def fingerprint(self) -> str:
        """Return the SHA-256 over type, shape and bytes of inputs, targets and groupings."""
        return hash_tensors(self.inputs, self.targets, *self.groupings.values())
