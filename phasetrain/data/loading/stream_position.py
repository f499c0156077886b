"""The position of a dataset that is read forward, as a part of the run state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.engine.batch import Batch


class StreamPosition:
    """Saves the position after the batches that were handed out, and restores it.

    Positions come with the batches, because workers read ahead, each with its own copy of the
    dataset. With another world size every rank begins at the position of rank 0, which is before
    the samples of all ranks, and reads the few samples to its own.

    Args:
        dataset: the dataset of this process.
    """

    is_optional = True

    def __init__(self, dataset: ForwardDataset) -> None:
        self._dataset = dataset
        self._latest: Mapping[str, Any] | None = None

    def record(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield the steps, and remember the position after each."""
        for batches in steps:
            positions = [batch.position for batch in batches if batch.position is not None]
            if positions:
                # The furthest one: a rank without samples of its own reads those of another one.
                self._latest = max(positions, key=lambda position: int(position["next"]))
            yield batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position; empty before the first batch."""
        if self._latest is None:
            return {}
        return dict(self._latest)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; the dataset begins there when a batch is requested."""
        self._latest = dict(state) or None
        if self._latest is not None:
            self._dataset.load_position(self._latest)

    rank_state = state_dict
    load_rank_state = load_state_dict

    def merge_rank_states(self, states: Sequence[Mapping[str, Any]], *, is_main: bool) -> None:
        """Keep the position of rank 0, which `load_state_dict` has loaded."""
