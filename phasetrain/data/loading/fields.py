"""Which values of a sample go to the model, and which to the loss (`DATA.*.inputs`, `targets`,
`labels`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from phasetrain.data.loading.collate import form
from phasetrain.errors import ConfigError, did_you_mean

Names = str | int | Sequence[str | int] | None
Labels = Literal["given", "sample_index", "zero"]


@dataclass(frozen=True)
class Selection:
    """What of a sample is input, and what is target.

    Attributes:
        inputs: a key of samples that are mappings, or a place in those that are lists or tuples:
            its value is the input; several keys make a mapping of them, several places a tuple.
            None takes the first of a pair.
        targets: the same for the target; none at all (`[]`) gives the target None. None takes the
            second of a pair.
        label_type: the target as the sample has it, or the sample's index, or 0.
        where: the split in messages, such as `DATA.TRAIN`.

    Raises:
        ConfigError: `targets` and `labels` contradict each other.

    Example:
        >>> Selection(inputs="image", targets="label").pair({"image": 5.0, "label": 1, "path": "a.png"}, 0)
        (5.0, 1)
    """

    inputs: Names = None
    targets: Names = None
    label_type: Labels = "given"
    where: str = "DATA"

    def __post_init__(self) -> None:
        if self.label_type != "given" and self.targets is not None:
            raise ConfigError(
                f"{self.where}.label_type = {self.label_type!r} and {self.where}.targets = {self.targets!r}: the "
                "target is either made or taken from the sample; set one of them"
            )

    @property
    def keeps_inputs(self) -> bool:
        """Whether inputs, and targets if any, are those of pairs, so that whole batches can be
        gathered."""
        return self.inputs is None and (self.targets is None or self._without)

    @property
    def _without(self) -> bool:
        return isinstance(self.targets, Sequence) and not self.targets

    def pair(self, sample: Any, index: int) -> tuple[Any, Any]:
        """Return input and target of a sample.

        Raises:
            TypeError: it is neither a pair nor what `inputs` and `targets` need.
            ValueError: it has no value of such a name or at such a place.
        """
        if self.inputs is None and self.targets is None and self.label_type == "given":
            return self._of_pair(sample)
        return self._input(sample), self._target(sample, index)

    def of_batch(self, targets: Tensor, ids: Tensor) -> Tensor | None:
        """Return the targets of a batch that was gathered as a whole, `(N,)`."""
        if self.label_type == "given":
            if self._without:
                return None
            return targets
        if self.label_type == "sample_index":
            return ids
        return torch.zeros_like(ids)

    def _input(self, sample: Any) -> Any:
        if self.inputs is not None:
            return self._taken(sample, self.inputs, "inputs")
        if isinstance(sample, Mapping):
            return self._of_pair(sample)[0]
        made = self.label_type != "given" or self._without
        if made and not _is_pair(sample):
            return sample
        return self._of_pair(sample)[0]

    def _target(self, sample: Any, index: int) -> Any:
        if self.label_type != "given":
            if self.label_type == "sample_index":
                return index
            return 0
        if self.targets is None:
            return self._of_pair(sample)[1]
        if self._without:
            return None
        return self._taken(sample, self.targets, "targets")

    def _taken(self, sample: Any, names: str | int | Sequence[str | int], key: str) -> Any:
        if isinstance(names, str | int):
            return self._value(sample, names, key)
        values = [self._value(sample, name, key) for name in names]
        if isinstance(sample, Mapping):
            return dict(zip(names, values, strict=True))
        return tuple(values)

    def _value(self, sample: Any, name: str | int, key: str) -> Any:
        where = f"{self.where}.{key}"
        if isinstance(sample, Mapping):
            if name not in sample:
                known = [str(one) for one in sample]
                raise ValueError(
                    f"{where} = {name!r}: the sample has no such name{did_you_mean(str(name), known) or ';'} it has "
                    f"{', '.join(known) or 'nothing'}"
                )
            return sample[name]
        if not isinstance(sample, list | tuple):
            raise TypeError(
                f"{where} = {name!r}: the data set gives {form(sample)}, expected a mapping, list or tuple"
            )
        if not isinstance(name, int) or not 0 <= name < len(sample):
            raise ValueError(
                f"{where} = {name!r}: the sample is {form(sample)}, expected a place from 0 to {len(sample) - 1}"
            )
        return sample[name]

    def _of_pair(self, sample: Any) -> tuple[Any, Any]:
        if _is_pair(sample):
            return sample[0], sample[1]
        advice = ""
        if isinstance(sample, Mapping | list | tuple):
            if isinstance(sample, Mapping):
                known = ", ".join(map(repr, sample))
            else:
                known = f"0 to {len(sample) - 1}"
            advice = f"; say by {self.where}.inputs and {self.where}.targets which of its values are which: {known}"
        raise TypeError(
            f"the data set gives {form(sample)}, expected a pair (input, target){advice}"
        )


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, list | tuple) and len(sample) == 2
