"""A batch is a pure function of seed and draw, whether read as a whole or sample by sample."""

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.data.bad_samples import OnBadSample, SampleError
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.loading.collate import COLLATES
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.loading.seed_check import is_identical
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms import TRANSFORMS
from phasetrain.data.transforms.base import BatchTransform, Keys, Pipeline
from phasetrain.runtime.machine import GLOBAL_GENERATORS

IMAGES = TensorSamples(
    torch.arange(6 * 16.0).view(6, 1, 4, 4) / 96, torch.tensor([0, 1, 2, 0, 1, 2])
)


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
        return torch.tensor(
            [float(torch.randn(())), np.random.standard_normal(), random.random()]
        ), index


class Faulty:
    """Ten samples of which four are bad, each in its way."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise OSError("no such file as <Bytes at 0x7f3d58a48b80>")
        if index == 3:
            return None
        return torch.full({5: (3,), 7: (0,)}.get(index, (2,)), float(index)), index


REASONS = {
    1: "OSError: no such file as <Bytes at 0x...>",
    3: "TypeError: the dataset returns NoneType, expected a pair (input, target)",
    5: "it is (float32 (3,), int), and the others of its batch are (float32 (2,), int)",
    7: "ValueError: its input is empty: float32 (0,)",
}


def reader(
    dataset: Any = IMAGES,
    *transforms: Any,
    seed: int = 0,
    collate: Any = None,
    on_bad_sample: OnBadSample = "raise",
) -> SampleReader:
    return SampleReader(
        dataset,
        Pipeline(transforms),
        collate or COLLATES["stack"](),
        seed=seed,
        on_bad_sample=on_bad_sample,
    )


def draw(*indices: int, epoch: int = 0, ordinal: int = 0, split: str = "train") -> Draw:
    return Draw(split, epoch, ordinal, np.array(indices, dtype=np.int64))


def noise() -> Any:
    return TRANSFORMS.build("noise", {"std": 0.1})


def shift() -> Any:
    return TRANSFORMS.build("random_shift", {"pixels": 1})


def test_batch_is_read_from_tensors() -> None:
    batch = reader()[draw(4, 0)]
    assert torch.equal(batch.input, IMAGES.inputs[[4, 0]])
    assert (batch.target.tolist(), batch.ids.tolist(), batch.size, batch.mask) == (
        [1, 0],
        [4, 0],
        2,
        None,
    )


def test_reading_sample_by_sample_is_bit_identical_to_reading_the_batch() -> None:
    whole, single = reader(IMAGES, shift(), noise()), reader(OneByOne(), shift(), noise())
    assert not whole.draws_at_random
    assert single.draws_at_random
    one, other = whole[draw(3, 1, 5, ordinal=8)], single[draw(3, 1, 5, ordinal=8)]
    assert torch.equal(one.input, other.input)
    assert torch.equal(one.target, other.target)
    assert not torch.equal(one.input, IMAGES.inputs[[3, 1, 5]])


def test_sample_depends_on_seed_split_epoch_ordinal_and_index_alone() -> None:
    def sample(seed: int = 0, **known: Any) -> Tensor:
        return reader(IMAGES, noise(), seed=seed)[draw(2, **known)].input[0]

    alone = sample()
    assert torch.equal(reader(IMAGES, noise())[draw(2, 4, 1)].input[0], alone)
    assert torch.equal(reader(IMAGES, noise())[draw(5, 2, ordinal=2)].input[1], sample(ordinal=3))
    others = [sample(seed=1), sample(epoch=1), sample(ordinal=1), sample(split="test")]
    assert not any(torch.equal(alone, other) for other in others)


def test_sample_of_a_test_does_not_depend_on_its_position() -> None:
    first, other = (
        reader(IMAGES, noise())[draw(2, ordinal=at, split="test")].input for at in (0, 3)
    )
    assert torch.equal(first, other)


def test_index_drawn_twice_is_augmented_differently() -> None:
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


def test_generators_are_seeded_for_collation() -> None:
    def mixed(samples: Any) -> tuple[Tensor, Tensor]:
        return torch.randn(len(samples)), torch.zeros(len(samples))

    def drawn(dataset: Any = None, *, seed: int = 0, **fields: Any) -> Tensor:
        return reader(dataset or OneByOne(), collate=mixed, seed=seed)[draw(0, 1, **fields)].input

    alone = drawn()
    assert torch.equal(drawn(), alone)
    assert torch.equal(drawn(Random()), alone), "it depends on what the samples have drawn"
    others = [drawn(seed=1), drawn(epoch=1), drawn(ordinal=2), drawn(split="test")]
    assert not any(torch.equal(alone, other) for other in others)


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (OSError("disk on fire"), "OSError: disk on fire"),
            (KeyError("x"), "KeyError: 'x'"),
            (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        ],
    )
    def test_error_names_the_unreadable_sample(self, error: Exception, text: str) -> None:
        class Broken(OneByOne):
            def __getitem__(self, index: int) -> Any:
                if index == 4:
                    raise error
                return super().__getitem__(index)

        with raises(SampleError, code="data.unreadable_sample", key="DATA.TRAIN") as caught:
            reader(Broken())[draw(0, 4)]
        assert "sample 4 " in str(caught.value)
        assert text in str(caught.value)
        assert "transforms[" not in str(caught.value)
        assert str(caught.value).endswith("DATA.TRAIN.on_bad_sample=drop")
        assert caught.value.exit_code == 1

    def test_error_of_a_transform_names_the_sample(self) -> None:
        def fail(value: Tensor) -> Tensor:
            raise ValueError("too dark")

        with raises(SampleError, code="data.unreadable_sample", key="DATA.TEST") as caught:
            reader(OneByOne(), fail)[draw(3, split="test")]
        assert "sample 3 " in str(caught.value)
        assert "ValueError: too dark, in transforms[0] (fail); " in str(caught.value)

    @pytest.mark.parametrize(
        ("sample", "text"),
        [
            (7, r"TypeError: .*\bint\b"),
            (None, r"TypeError: .*\bNoneType\b"),
            ((torch.ones(1), 2, 3), r"TypeError: .*\(float32 \(1,\), int, int\)"),
            (torch.zeros(2, 3), r"TypeError: .*float32 \(2, 3\)"),
            ((None, 1), r"ValueError: .*\bNone\b"),
            ((torch.zeros(3, 0), 1), r"ValueError: .*float32 \(3, 0\)"),
            ((np.zeros((0, 2)), 1), r"ValueError: .*array of float64 \(0, 2\)"),
        ],
    )
    def test_sample_without_a_usable_input_is_rejected(self, sample: Any, text: str) -> None:
        class Bare(OneByOne):
            def __getitem__(self, index: int) -> Any:
                return sample

        with raises(SampleError, code="data.unreadable_sample", key="DATA.TRAIN") as caught:
            reader(Bare())[draw(1)]
        assert re.search(f"sample 1 .*{text}", str(caught.value))

    def test_samples_of_different_shapes_are_rejected(self) -> None:
        class Ragged(OneByOne):
            def __getitem__(self, index: int) -> Any:
                return torch.zeros(index + 1), index

        with raises(SampleError, key="DATA.TRAIN") as caught:
            reader(Ragged())[draw(1, 3)]
        assert "samples 1, 3" in str(caught.value)

    def test_images_of_different_sizes_can_be_resized_by_their_dataset(self) -> None:
        class Images(OneByOne):
            size: int | None = None

            def __getitem__(self, index: int) -> Any:
                return torch.zeros(3, 4, index + 1), index

        with raises(SampleError, key="DATA.TRAIN") as caught:
            reader(Images())[draw(1, 3)]
        assert "; set DATA.TRAIN.size=..., or resize " in str(caught.value)

    def test_large_batches_are_named_by_their_first_samples(self) -> None:
        def fail(samples: Any) -> Any:
            raise KeyError("boxes")

        with raises(SampleError, key="DATA.TRAIN", code="data.collate") as caught:
            reader(OneByOne(), collate=fail)[draw(0, 1, 2, 3, 4)]
        assert "samples 0, 1, 2 and 2 more" in str(caught.value)
        assert "KeyError: 'boxes'" in str(caught.value)

    def test_error_of_a_batch_transform_names_the_split(self) -> None:
        flat = TensorSamples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
        with raises(SampleError, key="DATA.TRAIN"):
            reader(flat, shift())[draw(0, 1)]


class TestDrop:
    def test_bad_samples_are_dropped_from_the_batch(self) -> None:
        batch = reader(Faulty(), on_bad_sample="drop")[draw(0, 1, 2, 3, 4, 5, 6, 7)]
        assert (batch.ids.tolist(), batch.size, batch.ids.dtype) == ([0, 2, 4, 6], 4, torch.int64)
        assert batch.input.tolist() == [[0, 0], [2, 2], [4, 4], [6, 6]]
        assert batch.target.tolist() == [0, 2, 4, 6]
        assert dict(batch.bad) == REASONS

    def test_draw_of_bad_samples_alone_gives_an_empty_batch(self) -> None:
        batch = reader(Faulty(), on_bad_sample="drop")[draw(1, 3, 7, 1)]
        assert (batch.size, batch.ids.tolist(), batch.input) == (0, [], None)
        assert [index for index, _ in batch.bad] == [1, 3, 7]

    def test_padding_batch_is_masked_and_reproducible(self) -> None:
        batch = reader(Faulty(), noise(), on_bad_sample="drop").padding(draw(1, 3, 7))
        again = reader(Faulty(), noise(), on_bad_sample="drop").padding(draw(1, 3, 7))
        assert (len(batch.input), batch.size, batch.ids.tolist(), batch.bad) == (3, 0, [], ())
        assert batch.mask is not None
        assert batch.mask.tolist() == [False] * 3
        assert torch.equal(batch.input, again.input)

    def test_good_samples_are_unaffected_by_dropped_ones(self) -> None:
        alone = reader(Faulty(), noise(), on_bad_sample="drop")[draw(2, ordinal=1)]
        beside = reader(Faulty(), noise(), on_bad_sample="drop")[draw(1, 2)]
        assert torch.equal(alone.input, beside.input)


class TestOddForms:
    def ids(self, *indices: int) -> list[int]:
        found: list[int] = reader(Faulty(), on_bad_sample="drop")[draw(*indices)].ids.tolist()
        return found

    def test_most_frequent_form_wins_and_the_earliest_of_equals(self) -> None:
        assert self.ids(5, 0, 2) == [0, 2]
        assert self.ids(5, 5, 0) == [5, 5]
        assert self.ids(5, 0) == [5]
        assert self.ids(0, 5) == [0]
        assert self.ids(1, 5, 0) == [5]

    def test_any_form_is_accepted_if_the_collate_function_does_not_stack(self) -> None:
        def ragged(samples: Any) -> Any:
            return [value for value, _ in samples], torch.tensor([target for _, target in samples])

        batch = reader(Faulty(), collate=ragged, on_bad_sample="drop")[draw(0, 1, 5)]
        assert (batch.ids.tolist(), [len(value) for value in batch.input]) == ([0, 5], [2, 3])


class TestSubstitute:
    def test_bad_samples_are_replaced_by_other_samples(self) -> None:
        batch = reader(Faulty(), on_bad_sample="substitute")[draw(0, 1, 2, 3, 4, 5, 6, 7)]
        assert batch.ids.tolist() == [0, 4, 2, 8, 4, 8, 6, 2]
        assert batch.target.tolist() == batch.ids.tolist()
        assert torch.equal(batch.input, batch.ids[:, None].expand(8, 2).float())
        assert batch.size == 8
        assert dict(batch.bad) == REASONS

    def test_substitute_depends_on_seed_split_epoch_ordinal_and_index_alone(self) -> None:
        def taken(*indices: int, seed: int = 0, at: int = 0, **known: Any) -> list[float]:
            found = reader(Faulty(), noise(), seed=seed, on_bad_sample="substitute")[
                draw(*indices, **known)
            ]
            return [float(value) for value in found.input[at]]

        alone = taken(1, ordinal=4)
        assert taken(1, 0, 2, ordinal=4) == alone
        assert taken(0, 2, 1, ordinal=2, at=2) == alone
        others = [
            taken(1, ordinal=4, seed=1),
            taken(1, ordinal=4, epoch=1),
            taken(1, ordinal=4, split="test"),
            taken(1, ordinal=5),
            taken(3, ordinal=4),
        ]
        assert alone not in others

    def test_substitute_does_not_depend_on_the_global_generators(self) -> None:
        class Drawing(Faulty):
            def __getitem__(self, index: int) -> Any:
                _, target = super().__getitem__(index)
                return torch.randn(2), target

        made = reader(Drawing(), on_bad_sample="substitute")
        torch.manual_seed(1)
        first = made[draw(1, 3)]
        torch.manual_seed(2)
        assert torch.equal(made[draw(1, 3)].input, first.input)
        assert torch.equal(made[draw(3, ordinal=1)].input, first.input[1:])

    def test_bad_substitutes_are_reported(self) -> None:
        met = [
            reader(Faulty(), on_bad_sample="substitute")[draw(1, epoch=epoch)]
            for epoch in range(20)
        ]
        assert all(batch.ids[0] not in (1, 3, 7) for batch in met)
        assert {index for batch in met for index, _ in batch.bad} == {1, 3, 7}

    def test_first_substitute_defines_the_form_if_the_whole_draw_is_bad(self) -> None:
        batch = reader(Faulty(), on_bad_sample="substitute")[draw(1, 3, 7)]
        assert (batch.size, batch.input.shape) == (3, (3, 2))

    @pytest.mark.parametrize("length", [1, 2, 8])
    def test_dataset_without_a_good_sample_is_rejected(self, length: int) -> None:
        class Hopeless(Faulty):
            def __len__(self) -> int:
                return length

            def __getitem__(self, index: int) -> Any:
                raise OSError(f"no {index}")

        with raises(SampleError, code="data.no_substitute", given="'substitute'") as caught:
            reader(Hopeless(), on_bad_sample="substitute")[draw(0)]
        assert f"{length - 1} (OSError: no {length - 1})" in str(caught.value)


class TestSelection:
    class Named(OneByOne):
        def __getitem__(self, index: int) -> Any:
            return {"image": IMAGES[index][0], "label": int(IMAGES[index][1]), "size": float(index)}

    def made(self, dataset: Any, *transforms: Any, **given: Any) -> SampleReader:
        selection = FieldSelection(**given, where="DATA.TRAIN")
        return SampleReader(
            dataset, Pipeline(transforms), COLLATES["stack"](), seed=0, selection=selection
        )

    def test_fields_are_selected_by_name_and_the_input_is_transformed(self) -> None:
        batch = self.made(self.Named(), noise(), inputs="image", targets="label")[draw(4, 0)]
        expected = reader(IMAGES, noise())[draw(4, 0)]
        assert torch.equal(batch.input, expected.input)
        assert batch.target.tolist() == expected.target.tolist()

    def test_several_names_give_a_mapping(self) -> None:
        batch = self.made(self.Named(), inputs=["image", "size"], targets=["label"])[draw(4, 0)]
        assert (batch.input["image"].shape, batch.input["size"].tolist()) == (
            (2, 1, 4, 4),
            [4.0, 0.0],
        )
        assert batch.target["label"].tolist() == [1, 0]

    @pytest.mark.parametrize("dataset", [IMAGES, OneByOne()], ids=["whole", "one by one"])
    @pytest.mark.parametrize(
        ("given", "targets"),
        [
            ({"targets": []}, None),
            ({"label_type": "sample_index"}, [4, 0]),
            ({"label_type": "zero"}, [0, 0]),
        ],
    )
    def test_targets_are_omitted_or_generated(self, dataset: Any, given: Any, targets: Any) -> None:
        made = self.made(dataset, **given)
        assert made.draws_at_random == (dataset is not IMAGES)
        batch = made[draw(4, 0)]
        assert torch.equal(batch.input, IMAGES.inputs[[4, 0]])
        assert (None if batch.target is None else batch.target.tolist()) == targets

    def test_error_names_the_sample_and_the_missing_field(self) -> None:
        with raises(SampleError, code="data.unreadable_sample", suggestion="image") as caught:
            self.made(self.Named(), inputs="imge", targets="label")[draw(4)]
        assert re.search(r"sample 4 .*DATA\.TRAIN\.inputs = 'imge'", str(caught.value))

    def test_mapping_needs_names_of_inputs_and_targets(self) -> None:
        with raises(SampleError, key="DATA.TRAIN"):
            self.made(self.Named())[draw(4)]

    def test_derived_readers_select_the_same_fields(self) -> None:
        made = self.made(self.Named(), noise(), inputs="image", targets=[])
        assert made.with_pipeline(Pipeline())[draw(4)].target is None
        assert made.padding(draw(4)).target is None


class TestChosenSamples:
    def test_substitutes_come_from_the_subset(self) -> None:
        def others(chosen: Any) -> set[int]:
            made = SampleReader(
                Faulty(),
                Pipeline(),
                COLLATES["stack"](),
                seed=0,
                on_bad_sample="substitute",
                chosen=chosen,
            )
            return {int(made[draw(1, ordinal=ordinal)].ids[0]) for ordinal in range(60)}

        assert others(np.array([0, 1, 4, 9])) == {0, 4, 9}
        assert others(None) == {0, 2, 4, 5, 6, 8, 9}  # the control


class Watched:
    """Twelve samples, some of which draw; counts the calls per sample."""

    def __init__(self, *drawing: int, draw: Callable[[], float] = random.random) -> None:
        self.drawing, self.draw = drawing, draw
        self.calls: Counter[int] = Counter()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls[index] += 1
        number = self.draw() if index in self.drawing else 0.0
        return torch.tensor([float(index), number], dtype=torch.float64), index


class Lists(Watched):
    """The same with access to several samples, which counts its own calls."""

    lists = 0

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        self.lists += 1
        return [self[index] for index in indices]


GENERATORS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "torch normal": lambda: float(torch.randn(())),
    "numpy": np.random.random,
    "numpy normal": np.random.standard_normal,
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
}


def read_seeded(dataset: Any, *draws: Draw) -> list[Any]:
    """Return what the draws are if every sample is seeded."""
    seeded = reader(dataset)
    seeded.seeded_generators = GLOBAL_GENERATORS
    return [seeded[one].input.tolist() for one in draws]


class TestWatchedReading:
    """Samples are only seeded if they draw from a global generator."""

    draws = (draw(0, 5, 2), draw(7, 1, 3, ordinal=3), draw(3, 0, 9, ordinal=6))

    def test_dataset_that_draws_nothing_is_read_once_and_never_seeded(self) -> None:
        dataset = Watched()
        reading = reader(dataset)
        for one in self.draws:
            reading[one]
        assert dataset.calls == {0: 2, 5: 1, 2: 1, 7: 1, 1: 1, 3: 2, 9: 1}
        assert not reading.seeded_generators

    @pytest.mark.parametrize("name", list(GENERATORS))
    def test_generator_that_is_used_in_many_batches_is_seeded(self, name: str) -> None:
        dataset = Watched(1, draw=GENERATORS[name])
        reading = reader(dataset)
        draws = [*self.draws, *[draw(1, ordinal=batch) for batch in range(4)]]
        found = [reading[one].input.tolist() for one in draws]
        assert found == read_seeded(Watched(1, draw=GENERATORS[name]), *draws)
        # Four batches that draw are read twice, and the last one once, with seeds.
        assert dataset.calls == {0: 2, 5: 1, 2: 1, 7: 2, 1: 9, 3: 3, 9: 1}
        assert reading.seeded_generators == {name.partition(" ")[0]}

    def test_generator_that_is_used_later_is_seeded_too(self) -> None:
        uses = [random.random]
        dataset = Watched(0, 5, 2, 7, draw=lambda: sum(use() for use in uses))
        reading = reader(dataset)
        for batch in range(3):
            reading[draw(7, ordinal=batch)]
        assert reading.seeded_generators == {"python"}
        uses.append(np.random.random)
        found = [reading[one].input.tolist() for one in self.draws]
        assert found == read_seeded(dataset, *self.draws)
        assert reading.seeded_generators == {"python", "numpy"}

    def test_few_batches_that_draw_are_read_twice_and_the_others_are_not_seeded(self) -> None:
        draws = [draw(0, 5, ordinal=2 * batch) for batch in range(8)]
        rare = [*draws, draw(1, 5, ordinal=16), *draws]
        dataset = Watched(1, draw=np.random.random)
        reading = reader(dataset)
        found = [reading[one].input.tolist() for one in rare]
        assert found == read_seeded(Watched(1, draw=np.random.random), *rare)
        assert (dataset.calls, reading.seeded_generators) == ({0: 16, 5: 18, 1: 2}, frozenset())

    @pytest.mark.parametrize("name", list(GENERATORS))
    def test_draws_between_batches_do_not_count(self, name: str) -> None:
        reading = reader(Watched())
        for one in self.draws:
            GENERATORS[name]()
            reading[one]
        assert not reading.seeded_generators

    def test_error_that_was_drawn_is_not_raised(self) -> None:
        def fail_unless_seeded() -> float:
            found = random.random()
            if found != expected:
                raise OSError("unlucky")
            return found

        expected = read_seeded(Watched(1), draw(1))[0][0][1]
        assert reader(Watched(1, draw=fail_unless_seeded))[draw(1)].input.tolist() == [
            [1.0, expected]
        ]

    def test_bad_samples_are_read_once(self) -> None:
        class Bad(Watched):
            def __getitem__(self, index: int) -> tuple[Tensor, int]:
                found = super().__getitem__(index)
                if index == 5:
                    raise OSError("unreadable")
                return found

        dataset = Bad()
        batch = reader(dataset, on_bad_sample="drop")[self.draws[0]]
        assert (batch.ids.tolist(), dataset.calls) == ([0, 2], {0: 1, 5: 1, 2: 1})

    def test_list_access_is_used_once_the_check_allows_it(self) -> None:
        dataset = Lists()
        reading = reader(dataset)
        reading[draw(0, 1)]
        assert dataset.lists == 0
        reading.reads_lists = True
        assert reading[draw(0, 1)].input.tolist() == [[0.0, 0.0], [1.0, 0.0]]
        assert dataset.lists == 1

    def test_list_access_that_draws_is_read_one_by_one_with_seeds(self) -> None:
        reading = reader(Lists(1))
        reading.reads_lists = True
        found = [reading[one].input.tolist() for one in self.draws]
        assert found == read_seeded(Watched(1), *self.draws)

    def test_error_of_list_access_names_the_sample(self) -> None:
        class Bad(Lists):
            def __getitem__(self, index: int) -> tuple[Tensor, int]:
                if index == 5:
                    raise OSError("unreadable")
                return super().__getitem__(index)

        reading = reader(Bad())
        reading.reads_lists = True
        with raises(SampleError, code="data.unreadable_sample") as caught:
            reading[draw(4, 5)]
        assert "sample 5" in str(caught.value)


def add_noise(image: Tensor) -> Tensor:
    """Draw from a global generator, as transforms of other libraries do."""
    return image + torch.rand(())


TRANSFORMS_OF_BATCHES: dict[str, dict[str, Any]] = {
    "normalize": {"mean": [0.3], "std": [0.7]},
    "noise": {"std": 0.1},
    "random_shift": {"pixels": 1},
    "random_flip": {},
    "random_crop": {"size": 3, "padding": 1},
    "random_resized_crop": {"size": 3},
    "random_erase": {},
    "center_crop": {"size": 2},
    "resize": {"size": 7},
    "flatten": {},
    "multi_crop": {
        "groups": [
            {"views": 2, "transforms": [{"name": "random_crop", "size": 3}]},
            {"views": 1, "transforms": [{"name": "random_crop", "size": 2}]},
        ]
    },
}
OF_VISION = ("random_resized_crop", "random_erase", "multi_crop")
"""Transforms of the add-on vision."""


class TestStackedTransforms:
    """Batch transforms at the end of a pipeline run on the stacked samples."""

    def read_one_by_one(self, *transforms: Any) -> Any:
        samples = reader(OneByOne(), *transforms).read_samples(draw(*range(6)))
        return COLLATES["stack"]()(samples)[0]

    @pytest.mark.feature("data.drawing_samples")
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.addon("vision") if name in OF_VISION else ())
            for name in TRANSFORMS_OF_BATCHES
        ],
    )
    def test_bits_and_layout_are_those_of_single_samples(self, name: str) -> None:
        transform = TRANSFORMS.build(name, TRANSFORMS_OF_BATCHES[name])
        for transforms in ((transform,), (add_noise, transform)):
            found = reader(OneByOne(), *transforms)[draw(*range(6))].input
            assert is_identical(found, self.read_one_by_one(*transforms))
            views = found if isinstance(found, list) else [found]
            assert all(view.is_contiguous() for view in views)

    def test_transform_is_called_once_per_batch(self) -> None:
        calls = []

        class Recorded(BatchTransform):
            def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
                calls.append(len(batch))
                return batch

        reader(OneByOne(), Recorded(), Recorded())[draw(*range(6))]
        assert calls == [6, 6]

    def test_transforms_after_one_that_makes_equal_shapes_are_stacked(self) -> None:
        class Sizes(OneByOne):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                return IMAGES.inputs[index, :, : 2 + index % 2], IMAGES.targets[index]

        calls = []

        class Recorded(BatchTransform):
            def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
                calls.append(len(batch))
                return batch

        resize = TRANSFORMS.build("resize", {"size": 3})
        batch = reader(Sizes(), resize, Recorded())[draw(*range(6))]
        assert (batch.input.shape, calls) == ((6, 1, 3, 3), [6])

    def test_bad_sample_is_found_among_stacked_ones(self) -> None:
        class Picky(BatchTransform):
            def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
                if bool((batch == IMAGES.inputs[3]).all(dim=(1, 2, 3)).any()):
                    raise ValueError("does not suit")
                return batch

        batch = reader(OneByOne(), Picky(), on_bad_sample="drop")[draw(*range(6))]
        assert batch.ids.tolist() == [0, 1, 2, 4, 5]
        assert batch.bad == ((3, "ValueError: does not suit"),)
        with raises(SampleError, code="data.unreadable_sample") as caught:
            reader(OneByOne(), Picky())[draw(*range(6))]
        assert "sample 3" in str(caught.value)
