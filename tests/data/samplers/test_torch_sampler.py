"""A sampler of PyTorch becomes a function of the seed, or is rejected."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from phasetrain.data.samplers.phase_sampler import SAMPLERS, draw_pass, pass_length
from phasetrain.data.samplers.torch_sampler import TorchOrder, to_order
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import preserve_generators

DATA = range(10)


class Counting(Sampler[int]):
    """Begins one later in every pass."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index + self.passes) % 10 for index in DATA])


class OwnGenerator(Sampler[int]):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10, generator=self.generator).tolist())


class ByEpoch(OwnGenerator):
    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(epoch)


class ByNumPyAndPython:
    """Not even a Sampler of torch's, and of a length that differs in one of 2 passes."""

    def __init__(self, *, uneven: bool = False) -> None:
        self.uneven = uneven

    def __iter__(self) -> Iterator[int]:
        found = [int(np.random.randint(10)), random.randrange(10)]
        return iter(found * (found[0] % 2 + 1) if self.uneven else found)


@pytest.mark.feature("data.epoch_samplers")
def test_sampler_with_set_epoch_gets_the_number_of_the_epoch() -> None:
    order = TorchOrder(ByEpoch(), "DATA.TRAIN.sampler")
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(2)).tolist()
    assert draw_pass(order, 10, seed=7, epoch=2).tolist() == expected
    assert draw_pass(order, 10, seed=8, epoch=2).tolist() == expected
    assert draw_pass(order, 10, seed=7, epoch=3).tolist() != expected


@pytest.mark.feature(
    "75",
    "torch samplers and custom loaders with state",
    "`DATA.*.sampler`, `DATA.*.loader`, `DATA.*.fast_forward`",
)
@pytest.mark.parametrize("sampler", [RandomSampler(DATA), ByNumPyAndPython()])
def test_epoch_is_a_function_of_its_seed(sampler: Any) -> None:
    order = TorchOrder(sampler, "DATA.TRAIN.sampler")
    one, other = order(10, 3), order(10, 4)
    assert order(10, 3).tolist() == one.tolist()
    assert other.tolist() != one.tolist()
    assert one.dtype == np.int64


def test_order_is_that_of_torch_with_the_same_seed() -> None:
    with preserve_generators():
        torch.manual_seed(3)
        expected = list(RandomSampler(DATA))
    assert TorchOrder(RandomSampler(DATA), "x")(10, 3).tolist() == expected


def test_epoch_may_have_another_length_than_the_dataset() -> None:
    order = TorchOrder(WeightedRandomSampler([0.0, 1.0, 3.0], num_samples=40), "DATA.TRAIN.sampler")
    assert (pass_length(order, 3), len(order(3, 0))) == (40, 40)
    assert set(order(3, 0).tolist()) == {1, 2}


def test_global_generators_are_restored() -> None:
    def place() -> Any:
        return (
            torch.get_rng_state().tolist()[:64],
            np.random.get_state()[2],
            random.getstate()[1][-1],
        )

    before = place()
    TorchOrder(ByNumPyAndPython(), "x")(10, 7)
    assert place() == before


@pytest.mark.parametrize(
    ("sampler", "code"),
    [
        (Counting(), "config.impure_sampler"),
        (OwnGenerator(), "config.impure_sampler"),
        (DistributedSampler(DATA, 2, 0), "config.sharding_sampler"),  # type: ignore[arg-type]
        (BatchSampler(SequentialSampler(DATA), 4, False), "config.invalid_order"),
        (iter([]), "config.invalid_order"),
    ],
)
def test_unsuitable_samplers_are_rejected(sampler: Any, code: str) -> None:
    with raises(ConfigError, code=code, key="DATA.TRAIN.sampler"):
        TorchOrder(sampler, "DATA.TRAIN.sampler")


def test_epochs_of_unequal_length_are_rejected() -> None:
    order = TorchOrder(ByNumPyAndPython(uneven=True), "DATA.TRAIN.sampler")
    with raises(ConfigError, code="config.invalid_order", key="DATA.TRAIN.sampler"):
        list(map(partial(order, 10), range(20)))


def test_to_order_wraps_samplers_of_torch_and_rejects_numbers() -> None:
    shuffled = SAMPLERS["shuffled"]()
    assert to_order(shuffled, "x") is shuffled
    assert isinstance(to_order(RandomSampler(DATA), "x"), TorchOrder)
    with raises(ConfigError, code="config.invalid_order", key="DATA.TRAIN.sampler"):
        to_order(3, "DATA.TRAIN.sampler")
