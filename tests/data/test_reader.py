"""A batch is a pure function of seed and draw, read at once or sample by sample."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasetrain.data.collate import COLLATES
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.reader import Reader, SampleError
from phasetrain.data.sampler import Draw
from phasetrain.data.transforms import TRANSFORMS
from phasetrain.data.transforms.base import Pipeline

IMAGES = TensorSamples(torch.arange(6 * 16.0).view(6, 1, 4, 4) / 96, torch.tensor([0, 1, 2, 0, 1, 2]))


class OneByOne:
    """The same samples behind `__getitem__` alone."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return IMAGES[index]


class Random:
    """A sample made of all three global generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(torch.randn(())), np.random.standard_normal(), random.random()]), index


def reader(dataset: Any = IMAGES, *transforms: Any, seed: int = 0, collate: Any = None) -> Reader:
    return Reader(dataset, Pipeline(transforms), collate or COLLATES["stack"](), seed=seed)


def draw(*indices: int, epoch: int = 0, ordinal: int = 0, split: str = "train") -> Draw:
    return Draw(split, epoch, ordinal, np.array(indices, dtype=np.int64))


def noise() -> Any:
    return TRANSFORMS.build("noise", {"std": 0.1})


def shift() -> Any:
    return TRANSFORMS.build("random_shift", {"pixels": 1})


def test_a_batch_in_memory() -> None:
    batch = reader()[draw(4, 0)]
    assert torch.equal(batch.input, IMAGES.inputs[[4, 0]])
    assert (batch.target.tolist(), batch.ids.tolist(), batch.size, batch.mask) == ([1, 0], [4, 0], 2, None)


def test_sample_by_sample_gives_the_bits_of_the_whole_batch() -> None:
    whole, single = reader(IMAGES, shift(), noise()), reader(OneByOne(), shift(), noise())
    assert not whole.draws_at_random
    assert single.draws_at_random
    one, other = whole[draw(3, 1, 5, ordinal=8)], single[draw(3, 1, 5, ordinal=8)]
    assert torch.equal(one.input, other.input)
    assert torch.equal(one.target, other.target)
    assert not torch.equal(one.input, IMAGES.inputs[[3, 1, 5]])


def test_a_sample_depends_on_seed_split_epoch_ordinal_and_index_alone() -> None:
    def sample(seed: int = 0, **known: Any) -> Tensor:
        return reader(IMAGES, noise(), seed=seed)[draw(2, **known)].input[0]

    alone = sample()
    assert torch.equal(reader(IMAGES, noise())[draw(2, 4, 1)].input[0], alone)
    assert torch.equal(reader(IMAGES, noise())[draw(5, 2, ordinal=2)].input[1], sample(ordinal=3))
    others = [sample(seed=1), sample(epoch=1), sample(ordinal=1), sample(split="test")]
    assert not any(torch.equal(alone, other) for other in others)


def test_an_index_drawn_twice_is_augmented_twice() -> None:
    batch = reader(IMAGES, noise())[draw(2, 2)]
    assert not torch.equal(batch.input[0], batch.input[1])


def test_global_generators_are_seeded_for_each_sample() -> None:
    torch.manual_seed(1)
    first = reader(Random())[draw(0, 1, 2)].input
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(reader(Random())[draw(0, 1, 2)].input, first)
    assert torch.equal(reader(Random())[draw(1, 2, ordinal=1)].input, first[1:])
    assert len(set(first.flatten().tolist())) == 9


def test_collation_may_draw_too() -> None:
    def mixed(samples: Any) -> tuple[Tensor, Tensor]:
        return torch.randn(len(samples)), torch.zeros(len(samples))

    found = [reader(OneByOne(), collate=mixed)[draw(0, 1)].input for _ in range(2)]
    assert torch.equal(*found)


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (OSError("disk on fire"), "OSError: disk on fire"),
            (KeyError("x"), "KeyError: 'x'"),
            (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        ],
    )
    def test_a_sample_that_cannot_be_read_is_named(self, error: Exception, text: str) -> None:
        class Broken(OneByOne):
            def __getitem__(self, index: int) -> Any:
                if index == 4:
                    raise error
                return super().__getitem__(index)

        with pytest.raises(SampleError) as caught:
            reader(Broken())[draw(0, 4)]
        assert str(caught.value) == f"DATA.TRAIN: sample 4 cannot be read: {text}"
        assert caught.value.exit_code == 1

    def test_a_transform_that_fails_names_the_sample(self) -> None:
        def fail(value: Tensor) -> Tensor:
            raise ValueError("too dark")

        with pytest.raises(SampleError, match=r"^DATA\.TEST: sample 3 cannot be read: ValueError: too dark$"):
            reader(OneByOne(), fail)[draw(3, split="test")]

    def test_a_sample_that_is_no_pair(self) -> None:
        class Bare(OneByOne):
            def __getitem__(self, index: int) -> Any:
                return 7

        with pytest.raises(SampleError, match=r"sample 1 cannot be read: TypeError"):
            reader(Bare())[draw(1)]

    def test_samples_that_make_no_batch(self) -> None:
        class Ragged(OneByOne):
            def __getitem__(self, index: int) -> Any:
                return torch.zeros(index + 1), index

        with pytest.raises(SampleError) as caught:
            reader(Ragged())[draw(1, 3)]
        assert str(caught.value).startswith("DATA.TRAIN: samples [1, 3] do not make a batch: sample 1 of the batch has")

    def test_a_transform_of_whole_batches_that_fails(self) -> None:
        flat = TensorSamples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
        with pytest.raises(SampleError, match=r"^DATA\.TRAIN: samples \[0, 1\] .*takes images"):
            reader(flat, shift())[draw(0, 1)]
