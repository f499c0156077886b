"""Positions and updates of samples are found without computing the order before them."""

import time

import numpy as np
import pytest

from phasetrain.data.samplers.lanes import LaneOrder
from phasetrain.data.samplers.length_buckets import LengthBuckets
from phasetrain.data.samplers.locate import find_positions, find_updates
from phasetrain.data.samplers.overfit import OverfitOrder
from phasetrain.data.samplers.permutation import Identity, Indices, Permutation
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Pass, PhaseSampler, SampleOrder
from phasetrain.data.samplers.source import SubsetOrder
from phasetrain.distributed import World
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import PhaseSettings, Plan, Split, Stage

LENGTH = 137
IDS = np.array([0, 5, 77, 136])
CHOSEN = np.arange(0, 2 * LENGTH, 2)
LENGTHS = np.arange(LENGTH) % 11 + 1
SHARDS = [30, 0, 61, 1, 0, 45, 0]
ORDERS: dict[str, SampleOrder] = {
    "shuffled": SAMPLERS["shuffled"](),
    "sequential": SAMPLERS["sequential"](),
    "infinite": SAMPLERS["infinite"](samples=400),
    "repeated": SAMPLERS["repeated"](),
    "length_bucketed": LengthBuckets(8, LENGTHS, 3),
    "lanes": LaneOrder(12, SHARDS, 4),
    "lanes in order": LaneOrder(12, SHARDS, 3, shuffle=False),
    "overfit": OverfitOrder(SAMPLERS["shuffled"](), 24, 3),
}


def scan(found: Pass, ids: Indices) -> list[int]:
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


@pytest.mark.parametrize("length", [10, 11, 12, 13, 47])
@pytest.mark.parametrize("lanes", [1, 2, 6])
def test_lanes_are_inverted_at_their_borders(length: int, lanes: int) -> None:
    found = LaneOrder(12, [3, 0, length - 3], lanes)(length, 5)
    every = np.arange(length)
    assert find_positions(found, every).tolist() == every.tolist()
    for one in range(length):
        assert find_positions(found, np.array([one])).tolist() == scan(found, np.array([one]))


def test_positions_in_a_subset_are_those_of_a_search() -> None:
    found = SubsetOrder(SAMPLERS["shuffled"](), CHOSEN)(2 * LENGTH, 0)
    ids = np.array([0, 4, 5, 6, 270])
    assert find_positions(found, ids).tolist() == scan(found, ids)
    assert len(find_positions(found, ids)) == 4


def plan_of(length: int = 18, batch_size: int = 4, **settings: int) -> Plan:
    splits = {
        "train": Split("train", length, batch_size, drop_last=False),
        "test": Split("test", 5, 2, drop_last=False),
    }
    return interleave([Stage(splits, PhaseSettings(**settings))])


def sampler(length: int = 18, windows: tuple[int, ...] = ()) -> PhaseSampler:
    return PhaseSampler(
        SAMPLERS["shuffled"](),
        length,
        seed=0,
        micro_batch_size=2,
        world=World(),
        windows=windows,
    )


@pytest.mark.parametrize("tests", [1, 2, 99])
def test_updates_are_those_whose_draws_contain_the_samples(tests: int) -> None:
    plan = plan_of(epochs=3, test_every_updates=tests)
    made = sampler()
    ids = np.array([3, 11])
    expected = []
    updates = 0
    for phase in plan.phases:
        if phase.is_train:
            for draws in made.steps(phase):
                updates += 1
                if any(one in ids for draw in draws for one in draw.indices):
                    expected.append(updates)
    assert list(find_updates(plan, made, ids)) == expected
    assert len(expected) == 5


def test_samples_outside_of_the_updates_have_none() -> None:
    plan = plan_of(epochs=2, limit_train=1)
    made = sampler()
    used = {int(one) for phase in plan.phases for one in made.find_pass(phase)[0:4]}
    unused = np.array([one for one in range(18) if one not in used])
    assert len(unused) > 5
    assert list(find_updates(plan, made, unused)) == []


def test_only_the_epochs_before_the_first_update_are_looked_at() -> None:
    class Counted(PhaseSampler):
        epochs = 0

        def find_pass(self, phase: object) -> Pass:
            self.epochs += 1
            return Identity(18)

    made = Counted(SAMPLERS["sequential"](), 18, seed=0, micro_batch_size=2, world=World())
    assert next(find_updates(plan_of(epochs=1000), made, np.array([17]))) == 5
    assert made.epochs == 1
