"""Parts with their own generator are rejected by name; parts that use the seeded ones are
accepted."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.data.bad_samples import MissingValueError, OnBadSample, SampleError
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.loading.collate import COLLATES
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.loading.seed_check import (
    check_seeded,
    is_identical,
    read_first_shape,
    read_first_target,
)
from phasetrain.data.transforms import TRANSFORMS, FieldPipeline, parse_field_kinds
from phasetrain.data.transforms.base import Pipeline
from phasetrain.errors import ConfigError, did_you_mean


class Samples:
    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.ones(2) * index, index


class OwnGenerator(Samples):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.from_numpy(self.generator.standard_normal(2)), index


class OwnTargets(OwnGenerator):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.ones(2), float(self.generator.standard_normal())


class Caching(Samples):
    """Keeps samples, with or without the noise that it has added."""

    def __init__(self, *, noisy: bool) -> None:
        super().__init__()
        self.noisy = noisy
        self.kept: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index not in self.kept:
            self.kept[index] = torch.ones(2) * index
            if self.noisy:
                self.kept[index] += torch.rand(2)
        if self.noisy:
            return self.kept[index], index
        return self.kept[index] + torch.rand(2), index


class Counting(Samples):
    """Another sample for each call."""

    calls = 0

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.calls += 1
        return torch.tensor(self.calls), index


class SeededTorch(Samples):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.randn(2), index


class SeededNumpy(Samples):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.random.standard_normal(2), index


class SeededPython(Samples):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return random.random(), index


class NotANumber(Samples):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.tensor([float("nan")]), float("nan")


class Faulty(Samples):
    """Its first sample, and one of the others, cannot be read."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index in (0, 2):
            raise OSError(f"no {index}")
        return torch.randn(2), index


class FaultyOwnGenerator(OwnGenerator):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 0:
            raise OSError("no 0")
        return super().__getitem__(index)


class OwnJitter:
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, value: Tensor) -> Tensor:
        return value + torch.rand(2, generator=self.generator)


def jitter(value: Tensor) -> Tensor:
    return value + torch.rand(2)


def check(dataset: Any, *transforms: Any, on_bad_sample: OnBadSample = "raise") -> None:
    reader = SampleReader(
        dataset, Pipeline(transforms), COLLATES["stack"](), seed=0, on_bad_sample=on_bad_sample
    )
    check_seeded(reader, "mine")


@pytest.mark.parametrize(
    "dataset",
    [Samples(), Samples(1), SeededTorch(), SeededNumpy(), SeededPython(), NotANumber()],
    ids=lambda d: type(d).__name__,
)
def test_dataset_that_uses_the_seeded_generators_is_accepted(dataset: Samples) -> None:
    check(dataset)
    if isinstance(dataset, SeededTorch):
        check(dataset, jitter)


def test_dataset_that_keeps_what_it_has_drawn_is_rejected() -> None:
    check(Caching(noisy=False))
    with raises(ConfigError, code="config.impure_sample"):
        check(Caching(noisy=True))


@pytest.mark.parametrize(
    "dataset", [OwnGenerator(), OwnTargets(), Counting()], ids=lambda d: type(d).__name__
)
def test_dataset_with_its_own_generator_is_rejected(dataset: Samples) -> None:
    with raises(ConfigError, code="config.impure_sample") as caught:
        check(dataset, jitter)
    assert str(caught.value).startswith("dataset 'mine' ")


def test_transform_with_its_own_generator_is_rejected() -> None:
    with raises(ConfigError, code="config.impure_sample") as caught:
        check(Samples(), jitter, OwnJitter(), jitter)
    assert str(caught.value).startswith("transform 1 (OwnJitter) ")


@pytest.mark.parametrize("policy", ["substitute", "drop"])
def test_bad_samples_are_tolerated_if_the_run_tolerates_them(policy: OnBadSample) -> None:
    check(Faulty(), jitter, on_bad_sample=policy)
    with raises(SampleError, code="data.unreadable_sample", key="DATA.TRAIN") as caught:
        check(Faulty(), jitter)
    assert "OSError: no 0" in str(caught.value)


def test_own_generator_is_found_behind_bad_samples() -> None:
    with raises(ConfigError, code="config.impure_sample"):
        check(FaultyOwnGenerator(), jitter, on_bad_sample="drop")


def test_built_in_parts_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(self: TensorSamples, indices: Any) -> Any:
        raise AssertionError("read")

    # check() raises what a sample raises, so reading one fails the test.
    monkeypatch.setattr(TensorSamples, "__getitem__", untouched)
    monkeypatch.setattr(TensorSamples, "__getitems__", untouched)
    samples = TensorSamples(torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64))
    check(samples, TRANSFORMS.build("noise", {"std": 1.0}))


def test_subclass_of_tensor_samples_is_checked() -> None:
    generator = np.random.default_rng(0)

    class Shaky(TensorSamples):
        def __getitem__(self, index: int) -> Any:
            return self.inputs[index] + generator.normal(), self.targets[index]

    samples = Shaky(torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64))
    with raises(ConfigError, code="config.impure_sample"):
        check(samples)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), -torch.zeros(2), False),
        (torch.zeros(2), torch.zeros(2).int(), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (np.float32("nan"), np.float32("nan"), True),
        (np.zeros(2), np.zeros(2), True),
        (np.zeros(2), np.zeros(2, dtype=np.float32), False),
        ({"a": [torch.ones(1), 2]}, {"a": [torch.ones(1), 2]}, True),
        ({"a": [torch.ones(1), 2]}, {"a": [torch.ones(1), 3]}, False),
        ({"a": 1}, {"b": 1}, False),
        ((1, 2), (1,), False),
        ("x", "x", True),
    ],
)
def test_equality_is_bitwise(one: Any, other: Any, equal: bool) -> None:
    assert is_identical(one, other) is equal


class TestFirstTarget:
    def test_target_of_the_first_sample_is_read(self) -> None:
        assert read_first_target(read_by([(torch.zeros(2), 7), (torch.zeros(2), 8)])) == 7
        assert read_first_target(read_by([(torch.zeros(2), None)])) is None

    def test_target_is_unknown_if_the_sample_cannot_be_read(self) -> None:
        assert read_first_target(read_by([(None, 3)], "drop")) is ...

    def test_target_is_read_from_tensors(self) -> None:
        samples = TensorSamples(torch.zeros(3, 2), torch.tensor([4, 0, 0]))
        assert int(read_first_target(read_by(samples))) == 4


class Keyed(Samples):
    """Mappings, some of which lack what the others have."""

    def __init__(self, lacking: tuple[int, ...] = (), broken: tuple[int, ...] = ()) -> None:
        super().__init__(40)
        self.lacking, self.broken = lacking, broken

    def __getitem__(self, index: int) -> Any:
        if index in self.broken:
            raise OSError("gone")
        return {"image": torch.ones(2)} | ({} if index in self.lacking else {"label": index})


class TestNames:
    LOOKED_AT = (0, 5, 10, 15, 20, 25, 30, 35)

    def reader(self, samples: Any, policy: OnBadSample, **names: Any) -> SampleReader:
        selection = FieldSelection(
            **{"inputs": "image", "targets": "label", "where": "DATA.VALID"} | names
        )
        return SampleReader(
            samples,
            Pipeline(),
            COLLATES["stack"](),
            seed=0,
            on_bad_sample=policy,
            selection=selection,
        )

    @pytest.mark.parametrize("policy", ["raise", "drop", "substitute"])
    def test_field_that_no_sample_has_is_a_config_error(self, policy: OnBadSample) -> None:
        expected = {"code": "config.missing_field", "key": "DATA.VALID.targets"}
        with raises(ConfigError, given="'lable'", suggestion="label", **expected) as caught:
            read_first_target(self.reader(Keyed(broken=(5,)), policy, targets="lable"))
        assert " 7 samples" in str(caught.value)

    def test_mappings_need_names_of_inputs_and_targets(self) -> None:
        with raises(ConfigError, code="config.missing_field", key="DATA.VALID"):
            read_first_target(self.reader(Keyed(), "drop", inputs=None, targets=None))

    def test_samples_without_a_field_that_others_have_are_bad(self) -> None:
        reader = self.reader(Keyed(lacking=self.LOOKED_AT[:-1]), "drop")
        assert read_first_target(reader) is ...
        with raises(SampleError, code="data.unreadable_sample"):
            read_first_target(self.reader(Keyed(lacking=self.LOOKED_AT[:-1]), "raise"))

    def test_unreadable_samples_do_not_count_as_missing_a_field(self) -> None:
        assert (
            read_first_target(self.reader(Keyed(broken=self.LOOKED_AT), "drop", targets="lable"))
            is ...
        )

    def test_first_sample_of_the_subset_is_read(self) -> None:
        reader = SampleReader(
            Keyed(),
            Pipeline(),
            COLLATES["stack"](),
            seed=0,
            selection=FieldSelection("image", "label"),
        )
        reader.chosen = np.array([7, 9])
        assert read_first_target(reader) == 7

    @pytest.mark.parametrize("policy", ["raise", "drop"])
    @pytest.mark.parametrize(
        ("kinds", "code", "key", "suggestion"),
        [
            ({"image": "value", "lable": "labels"}, "config.missing_field", "lable", "label"),
            ({"image": "mask"}, "config.misfit", "image", ""),
        ],
    )
    def test_declared_field_that_no_sample_has_is_a_config_error(
        self, policy: OnBadSample, kinds: Any, code: str, key: str, suggestion: str
    ) -> None:
        reader = self.reader(Keyed(), policy)
        declared = parse_field_kinds(kinds, "DATA.VALID.fields")
        reader = reader.with_pipeline(FieldPipeline([], declared, "DATA.VALID"))
        expected = {"code": code, "key": f"DATA.VALID.fields.{key}", "suggestion": suggestion}
        with raises(ConfigError, **expected) as caught:
            read_first_target(reader)
        assert " 8 samples" in str(caught.value)

    def test_declared_field_that_some_samples_have_is_no_config_error(self) -> None:
        declared = parse_field_kinds({"image": "value", "label": "value"}, "DATA.VALID.fields")
        reader = self.reader(Keyed(lacking=self.LOOKED_AT[:-1]), "raise")
        with raises(SampleError, code="data.unreadable_sample"):
            read_first_target(reader.with_pipeline(FieldPipeline([], declared, "DATA.VALID")))

    def test_missing_key_of_samples_is_named(self) -> None:
        class Misspelt(Samples):
            def __getitem__(self, index: int) -> Any:
                near = did_you_mean("taget", ["input", "target"])
                raise MissingValueError(f"target_key = 'taget': there is no 'taget'{near}")

        expected = {"code": "config.missing_field", "key": "DATA.VALID.target_key"}
        with raises(ConfigError, given="'taget'", suggestion="target", **expected):
            read_first_target(self.reader(Misspelt(), "drop", inputs=None, targets=None))


class Sized(Samples):
    """Images, the last of which may have another size."""

    def __init__(self, last: int) -> None:
        super().__init__(40)
        self.last = last

    def __getitem__(self, index: int) -> Any:
        side = self.last if index == 35 else 16
        return torch.zeros(1, side, side), index


class TestSizes:
    def reader(self, last: int, name: str, policy: OnBadSample = "raise") -> SampleReader:
        crop = TRANSFORMS.build(name, {"size": 40})
        return read_by(Sized(last), policy).with_pipeline(Pipeline([crop]))

    @pytest.mark.parametrize("name", ["random_crop", "center_crop"])
    @pytest.mark.parametrize("read", [read_first_target, read_first_shape])
    def test_crop_for_which_every_sample_is_too_small_is_a_config_error(
        self, name: str, read: Callable[[SampleReader], Any]
    ) -> None:
        with raises(ConfigError, code="config.misfit", key="DATA.TRAIN.transforms") as caught:
            read(self.reader(16, name))
        assert "16 x 16 " in str(caught.value)
        assert "size = 40" in str(caught.value)

    def test_sample_that_is_smaller_than_others_is_bad(self) -> None:
        with raises(SampleError, code="data.unreadable_sample"):
            read_first_target(self.reader(50, "random_crop"))
        assert read_first_target(self.reader(50, "random_crop", "drop")) is ...


def read_by(samples: Any, on_bad_sample: OnBadSample = "raise") -> SampleReader:
    return SampleReader(
        samples, Pipeline(), COLLATES["stack"](), seed=0, on_bad_sample=on_bad_sample
    )


class Lists(Samples):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class OtherLists(Samples):
    """Whose two ways of reading disagree."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [(self[index][0] + 1, index) for index in indices]


class WholeBatches(Samples):
    def __getitems__(self, indices: list[int]) -> Any:
        return torch.zeros(len(indices), 2), torch.tensor(indices)


class NoLists(Samples):
    def __getitems__(self, indices: list[int]) -> Any:
        raise NotImplementedError


class DerivedSeed(Samples):
    """Draws from a generator seeded with the seed of the global one, which stays as it is."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        return torch.rand(2, generator=generator), index


def choose(dataset: Any) -> tuple[frozenset[str], bool]:
    reader = SampleReader(dataset, Pipeline(), COLLATES["stack"](), seed=0)
    check_seeded(reader, "mine")
    return reader.seeded_generators, reader.reads_lists


@pytest.mark.parametrize(
    ("dataset", "seeds", "lists"),
    [
        (Samples(), set(), False),
        (Lists(), set(), True),
        (OtherLists(), set(), False),
        (WholeBatches(), set(), False),
        (NoLists(), set(), False),
        (SeededTorch(), set(), False),
        (SeededNumpy(), set(), False),
        (SeededPython(), set(), False),
        (DerivedSeed(), {"torch", "numpy", "python"}, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_check_chooses_the_fastest_way_of_reading_that_is_exact(
    dataset: Any, seeds: set[str], lists: bool
) -> None:
    assert choose(dataset) == (seeds, lists)
