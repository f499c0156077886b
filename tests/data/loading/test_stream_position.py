"""The position of a dataset that is read forward is the one after the furthest batch of a step."""

from typing import Any

from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.loader import StreamPosition
from phasetrain.engine.batch import Batch


def batch(position: int | None) -> Batch:
    saved: Any = None if position is None else {"next": position}
    return Batch(None, None, None, 0, position=saved)


def test_position_is_the_furthest_of_the_last_step_that_has_any() -> None:
    position = StreamPosition(ForwardDataset(["a", "b"], seed=0))
    assert position.state_dict() == {}
    steps = [[batch(2), batch(4)], [batch(6), batch(9), batch(7), batch(None)], [batch(None)]]
    seen = [position.state_dict() for _ in position.record(iter(steps))]
    assert seen == [{"next": 4}, {"next": 9}, {"next": 9}]
