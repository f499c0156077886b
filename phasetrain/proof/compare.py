"""Bit equality of values, and the first difference of nested states, of traces and of ledgers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.proof.causes import explain, name_section
from phasetrain.proof.digest import to_plain_key, view_bytes, view_integers
from phasetrain.proof.positions import PhaseLabel, StepPosition, describe_position
from phasetrain.proof.trace import Digests, Trace
from phasetrain.runs.ledger import COMPONENTS, Ledger, list_differences


@dataclass(frozen=True)
class Difference:
    """The first difference of two traces.

    Attributes:
        position: the position after the step.
        path: the first path that differs, such as `state.model.head.weight`.
        is_restored: it differs right after a restore, before any step.
    """

    position: StepPosition
    path: str
    is_restored: bool = False

    @property
    def cause(self) -> str:
        """The usual cause."""
        if self.is_restored:
            return explain("restored.state")
        return explain(self.path)

    @property
    def section(self) -> str:
        """The section of the config to look at, such as `MODEL` or `METERS.accuracy`."""
        # The gradients were equal, so the optimizer has moved the weights in another way.
        if not self.is_restored and self.path.startswith(("state.model.", "state.loss.")):
            return "OPTIMIZER"
        return name_section(self.path)

    def describe(self, before: str, phases: Sequence[PhaseLabel], rank: int | None = None) -> str:
        """Return the difference and its usual cause as a sentence.

        Args:
            before: the event before the difference, such as `killed after step 3`.
            phases: the phases of the plan.
            rank: the rank that has seen it, if there are several.
        """
        when = describe_position(self.position, phases)
        if rank is not None:
            when = f"{when}, rank {rank}"
        if self.is_restored:
            return f"{before}, restored at {when}: {self.path} differs; {self.cause}"
        return f"{before}: {self.path} differs at {when}. Usual cause: {self.cause}"


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal bit for bit.

    NaN equals NaN with the same bits, 0.0 differs from -0.0, and dtypes, shapes and keys count.
    """
    return not differences(value, other)


def differences(value: Any, other: Any, path: str = "state") -> list[str]:
    """Return the paths at which two nested states are not equal bit for bit, see `is_equal`."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        # A dict, not a set: differences are listed in the order of the keys.
        keys = {**value, **other}
        paths = [f"{path}.{key}" for key in keys if key not in value or key not in other]
        for key in value:
            if key in other:
                paths += differences(value[key], other[key], f"{path}.{key}")
        return paths
    for sequence in (list, tuple):
        if isinstance(value, sequence) and isinstance(other, sequence) and len(value) == len(other):
            pairs = enumerate(zip(value, other, strict=True))
            return [below for i, pair in pairs for below in differences(*pair, f"{path}.{i}")]
    if _is_equal_leaf(value, other):
        return []
    return [path]


def _is_equal_leaf(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # As bytes, see `view_bytes`.
        return _has_same_form(value, other) and torch.equal(view_bytes(value), view_bytes(other))
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return _has_same_form(value, other) and value.tobytes() == other.tobytes()
    if isinstance(value, Tensor | np.ndarray) or isinstance(other, Tensor | np.ndarray):
        return False
    return bool(to_plain_key(value) == to_plain_key(other))


def _has_same_form(value: Any, other: Any) -> bool:
    return bool((value.dtype, value.shape) == (other.dtype, other.shape))


def count_changed(tensor: Tensor, other: Tensor) -> int:
    """Return the number of entries of two tensors that are not equal bit for bit.

    Tensors of different shape or dtype differ in all entries.
    """
    if not _has_same_form(tensor, other):
        return max(tensor.numel(), other.numel(), 1)
    return int((view_integers(tensor.cpu()) != view_integers(other.cpu())).sum())


def list_differing(digests: Digests, other: Digests) -> Iterator[str]:
    """Yield the paths whose digests differ or are missing in one, in the order of the first."""
    return (path for path in {**digests, **other} if digests.get(path) != other.get(path))


def find_difference(reference: Trace, attempt: Trace) -> Difference | None:
    """Return the first difference of an attempt from the run without kills, or None."""
    if attempt.restored is not None:
        position, state = attempt.restored
        expected = {
            path: digest
            for path, digest in reference.steps.get(position, {}).items()
            if path.startswith("state.")
        }
        # The first path is enough: later ones may follow from it.
        for path in list_differing(expected, state):
            return Difference(position, path, is_restored=True)
    for position, step in attempt.steps.items():
        for path in list_differing(reference.steps.get(position, {}), step):
            return Difference(position, path)
    return None


def find_first_update(
    ledger: Ledger, other: Ledger, components: Collection[str] = COMPONENTS
) -> tuple[int, tuple[str, ...]] | None:
    """Return the first update in both ledgers that differs, and the components in which it does;
    None if there is none.

    Args:
        ledger: its order of the updates counts.
        other: the other ledger.
        components: the components to compare.
    """
    for update in ledger:
        if update not in other:
            continue
        names = list_differences(ledger[update], other[update])
        if differing := tuple(name for name in names if name in components):
            return update, differing
    return None
