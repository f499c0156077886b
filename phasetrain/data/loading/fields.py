"""Selection of the input and the target of a sample (`DATA.*.inputs`, `targets`, `labels`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from phasetrain.data.loading.collate import describe_form
from phasetrain.errors import ConfigError, did_you_mean

Names = str | int | Sequence[str | int] | None
Labels = Literal["given", "sample_index", "zero"]


@dataclass(frozen=True)
class FieldSelection:
    """Which values of a sample are its input and its target.

    Attributes:
        inputs: a key of mappings, or an index of lists or tuples, whose value is the input; several
            keys make a mapping, several indices a tuple. None uses the first of a pair, or the
            value of a tuple of one.
        targets: the same for the target; an empty list sets the target to None. None uses the
            second of a pair, or None for a tuple of one.
        label_type: `given` uses the target of the sample, `sample_index` its index, `zero` 0.
        where: the split in messages, such as `DATA.TRAIN`.

    Raises:
        ConfigError: `targets` and `label_type` contradict each other.

    Example:
        >>> sample = {"image": 5.0, "label": 1, "path": "a.png"}
        >>> FieldSelection(inputs="image", targets="label").split_sample(sample, 0)
        (5.0, 1)
    """

    inputs: Names = None
    targets: Names = None
    label_type: Labels = "given"
    where: str = "DATA.TRAIN"

    def __post_init__(self) -> None:
        if self.label_type != "given" and self.targets is not None:
            raise ConfigError(
                f"{self.where}.label_type = {self.label_type!r} and {self.where}.targets = "
                f"{self.targets!r}: the target is either generated or read from the sample; set "
                "one of them",
                code="config.conflict",
            )

    @property
    def keeps_inputs(self) -> bool:
        """Whether inputs and targets are the ones of pairs, so that whole batches can be
        gathered."""
        return self.inputs is None and (self.targets is None or self._has_no_target)

    @property
    def _has_no_target(self) -> bool:
        return isinstance(self.targets, Sequence) and not self.targets

    def split_sample(self, sample: Any, index: int) -> tuple[Any, Any]:
        """Return input and target of a sample.

        Raises:
            TypeError: it is neither a pair nor fits `inputs` and `targets`.
            ValueError: it has no such key or index.
        """
        if self.inputs is None and self.targets is None and self.label_type == "given":
            return self._split_pair(sample)
        return self._read_input(sample), self._read_target(sample, index)

    def split_samples(self, samples: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
        """Return input and target of each sample.

        Raises:
            TypeError, ValueError: see `split_sample`.
        """
        takes_pairs = self.inputs is None and self.targets is None and self.label_type == "given"
        # Most samples are pairs, and a call for each of them would cost a tenth of reading it.
        if takes_pairs and set(map(type, samples)) == {tuple} and set(map(len, samples)) == {2}:
            return samples
        return [
            self.split_sample(sample, index) for sample, index in zip(samples, indices, strict=True)
        ]

    def select_targets(self, targets: Tensor, ids: Tensor) -> Tensor | None:
        """Return the targets of a batch that was gathered as a whole, `(N,)`."""
        if self.label_type == "given":
            if self._has_no_target:
                return None
            return targets
        if self.label_type == "sample_index":
            return ids
        return torch.zeros_like(ids)

    def _read_input(self, sample: Any) -> Any:
        if self.inputs is not None:
            return self._read_fields(sample, self.inputs, "inputs")
        if isinstance(sample, Mapping):
            return self._split_pair(sample)[0]
        made = self.label_type != "given" or self._has_no_target
        if made and not _is_pair(sample):
            return sample
        return self._split_pair(sample)[0]

    def _read_target(self, sample: Any, index: int) -> Any:
        if self.label_type != "given":
            if self.label_type == "sample_index":
                return index
            return 0
        if self.targets is None:
            return self._split_pair(sample)[1]
        if self._has_no_target:
            return None
        return self._read_fields(sample, self.targets, "targets")

    def _read_fields(self, sample: Any, names: str | int | Sequence[str | int], key: str) -> Any:
        if isinstance(names, str | int):
            return self._read_field(sample, names, key)
        values = [self._read_field(sample, name, key) for name in names]
        if isinstance(sample, Mapping):
            return dict(zip(names, values, strict=True))
        return tuple(values)

    def _read_field(self, sample: Any, name: str | int, key: str) -> Any:
        where = f"{self.where}.{key}"
        if isinstance(sample, Mapping):
            if name not in sample:
                names = [str(entry) for entry in sample]
                near = did_you_mean(str(name), names) or ";"
                raise ValueError(
                    f"{where} = {name!r}: the sample has no such key{near} it has "
                    f"{', '.join(names) or 'nothing'}"
                )
            return sample[name]
        if not isinstance(sample, list | tuple):
            raise TypeError(
                f"{where} = {name!r}: the dataset returns {describe_form(sample)}, expected a "
                "mapping, list or tuple"
            )
        if not isinstance(name, int) or not 0 <= name < len(sample):
            raise ValueError(
                f"{where} = {name!r}: the sample is {describe_form(sample)}, expected an index "
                f"from 0 to {len(sample) - 1}"
            )
        return sample[name]

    def _split_pair(self, sample: Any) -> tuple[Any, Any]:
        if _is_pair(sample):
            return sample[0], sample[1] if len(sample) == 2 else None
        advice = ""
        if isinstance(sample, Mapping | list | tuple):
            if isinstance(sample, Mapping):
                choices = ", ".join(map(repr, sample))
            else:
                choices = f"0 to {len(sample) - 1}"
            advice = (
                f"; select its values with {self.where}.inputs and {self.where}.targets: {choices}"
            )
        elif sample is not None:
            advice = f"; if it has no targets, set {self.where}.targets=[]"
        raise TypeError(
            f"the dataset returns {describe_form(sample)}, expected a pair (input, target){advice}"
        )


def _is_pair(sample: Any) -> bool:
    """Return whether a sample is a pair, or a tuple of an input alone, as torch's
    `TensorDataset(inputs)` returns it."""
    return isinstance(sample, list | tuple) and (
        len(sample) == 2 or (isinstance(sample, tuple) and len(sample) == 1)
    )
