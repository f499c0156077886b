"""Positions of samples are found without computing the order before them."""

import time

import numpy as np
import pytest

from phasetrain.data.samplers.epoch_stream import EpochStream
from phasetrain.data.samplers.locate import EpochOrder, find_positions
from phasetrain.data.samplers.named import DrawOrder, Draws
from phasetrain.data.samplers.overfit import OverfitOrder
from phasetrain.data.samplers.permutation import Indices, Permutation
from phasetrain.data.samplers.phase_sampler import SAMPLERS, SampleOrder
from phasetrain.data.samplers.source import SubsetOrder

LENGTH = 137
IDS = np.array([0, 5, 77, 136])
CHOSEN = np.arange(0, 2 * LENGTH, 2)


def draw_shuffled(length: int, seed: int) -> Draws:
    stream = EpochStream(length, seed)
    return lambda begin, end: stream[begin:end]


ORDERS: dict[str, SampleOrder] = {
    "shuffled": SAMPLERS["shuffled"](),
    "sequential": SAMPLERS["sequential"](),
    "drawn": DrawOrder(draw_shuffled, samples=400),
    "overfit": OverfitOrder(SAMPLERS["shuffled"](), 24, 3),
}


def scan(found: EpochOrder, ids: Indices) -> list[int]:
    return [place for place, one in enumerate(found[0 : len(found)].tolist()) if one in ids]


@pytest.mark.parametrize("length", [1, 2, 5, 1000, 2**16, 2**16 + 1, 2**20 + 7])
def test_permutation_is_inverted(length: int) -> None:
    order = Permutation(length, 3)
    places = np.unique(np.linspace(0, length - 1, 50).astype(np.int64))
    assert order.find(order.at(places)).tolist() == places.tolist()
    assert order.find(np.array([-1, length])).tolist() == []


def test_every_number_of_the_largest_permutation_takes_constant_time() -> None:
    order = Permutation(2**62, 0)
    began = time.perf_counter()
    places = order.find(np.arange(1000, dtype=np.int64))
    assert time.perf_counter() - began < 1
    assert order.at(places).tolist() == list(range(1000))


@pytest.mark.feature(
    "data.locate",
    "the first update with a sample is known before the run, by the inverse of the order",
    "`phasetrain.data.samplers.locate`",
)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_positions_are_those_of_a_search(name: str, seed: int) -> None:
    found = ORDERS[name](LENGTH, seed)
    for ids in (IDS, np.arange(LENGTH), np.array([LENGTH]), IDS[:1]):
        assert find_positions(found, ids).tolist() == scan(found, ids)


def test_positions_in_a_subset_are_those_of_a_search() -> None:
    found = SubsetOrder(SAMPLERS["shuffled"](), CHOSEN)(2 * LENGTH, 0)
    ids = np.array([0, 4, 5, 6, 270])
    assert find_positions(found, ids).tolist() == scan(found, ids)
    assert len(find_positions(found, ids)) == 4
