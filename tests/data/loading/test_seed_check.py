"""Parts with a generator of their own are refused by name; those that use the seeded ones are
accepted."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.data.bad_samples import OnBadSample, SampleError
from phasetrain.data.datasets import Lines
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.data.loading.collate import COLLATES
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.loading.seed_check import check_seeded, is_identical, read_first_target
from phasetrain.data.mixture import MixedDataset
from phasetrain.data.transforms import TRANSFORMS
from phasetrain.data.transforms.base import Pipeline
from phasetrain.errors import ConfigError


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
def test_what_uses_the_seeds_is_accepted(dataset: Samples) -> None:
    check(dataset)
    if isinstance(dataset, SeededTorch):
        check(dataset, jitter)


@pytest.mark.parametrize(
    "dataset", [OwnGenerator(), OwnTargets(), Counting()], ids=lambda d: type(d).__name__
)
def test_a_data_set_that_ignores_them_is_named(dataset: Samples) -> None:
    with pytest.raises(ConfigError) as caught:
        check(dataset, jitter)
    assert caught.value.code == "config.impure_sample"
    assert str(caught.value).startswith("dataset 'mine' returns different samples")


def test_a_transform_that_ignores_them_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^transform 1 \(OwnJitter\) returns different samples"):
        check(Samples(), jitter, OwnJitter(), jitter)


@pytest.mark.parametrize("policy", ["substitute", "drop"])
def test_bad_samples_are_put_up_with_where_the_run_does(policy: OnBadSample) -> None:
    check(Faulty(), jitter, on_bad_sample=policy)
    with pytest.raises(
        SampleError, match=r"^DATA\.TRAIN: sample 0 cannot be read: OSError: no 0; "
    ):
        check(Faulty(), jitter)


def test_bad_samples_hide_no_generator() -> None:
    with pytest.raises(ConfigError, match=r"^dataset 'mine' returns different samples"):
        check(FaultyOwnGenerator(), jitter, on_bad_sample="drop")


def test_our_own_parts_are_trusted_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(self: TensorSamples, indices: Any) -> Any:
        raise AssertionError("read")

    monkeypatch.setattr(TensorSamples, "__getitem__", untouched)
    monkeypatch.setattr(TensorSamples, "__getitems__", untouched)
    samples = TensorSamples(torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64))
    check(samples, TRANSFORMS.build("noise", {"std": 1.0}))


def test_a_data_set_in_memory_with_code_of_its_own_is_not_trusted() -> None:
    generator = np.random.default_rng(0)

    class Shaky(TensorSamples):
        def __getitem__(self, index: int) -> Any:
            return self.inputs[index] + generator.normal(), self.targets[index]

    samples = Shaky(torch.zeros(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="it has its own generator"):
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
def test_equality_is_bit_for_bit(one: Any, other: Any, equal: bool) -> None:
    assert is_identical(one, other) is equal


class TestFirstTarget:
    def test_of_samples_read_one_by_one(self) -> None:
        assert read_first_target(read_by([(torch.zeros(2), 7), (torch.zeros(2), 8)])) == 7
        assert read_first_target(read_by([(torch.zeros(2), None)])) is None

    def test_of_a_sample_that_cannot_be_read(self) -> None:
        assert read_first_target(read_by([(None, 3)], "drop")) is ...

    def test_of_data_in_memory(self) -> None:
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
    def test_a_wrong_name_is_told_as_such(self, policy: OnBadSample) -> None:
        with pytest.raises(ConfigError) as caught:
            read_first_target(self.reader(Keyed(broken=(5,)), policy, targets="lable"))
        assert str(caught.value) == (
            "DATA.VALID.targets = 'lable': the sample has no such key; did you mean 'label'? it has image, label (so "
            "with each of 7 samples that were checked)"
        )

    def test_mappings_of_which_nobody_says_what_is_what(self) -> None:
        with raises(ConfigError, key="DATA.VALID"):
            read_first_target(self.reader(Keyed(), "drop", inputs=None, targets=None))

    def test_samples_that_lack_it_are_bad_where_others_have_it(self) -> None:
        reader = self.reader(Keyed(lacking=self.LOOKED_AT[:-1]), "drop")
        assert read_first_target(reader) is ...
        with pytest.raises(
            SampleError,
            match=r"^DATA\.\w+: sample 0 cannot be read: ValueError: DATA\.VALID\.targets",
        ):
            read_first_target(self.reader(Keyed(lacking=self.LOOKED_AT[:-1]), "raise"))

    def test_samples_that_cannot_be_read_say_nothing_of_names(self) -> None:
        assert (
            read_first_target(self.reader(Keyed(broken=self.LOOKED_AT), "drop", targets="lable"))
            is ...
        )

    def test_the_first_that_takes_part_is_looked_at(self) -> None:
        reader = SampleReader(
            Keyed(),
            Pipeline(),
            COLLATES["stack"](),
            seed=0,
            selection=FieldSelection("image", "label"),
        )
        reader.chosen = np.array([7, 9])
        assert read_first_target(reader) == 7

    def test_a_key_of_lines_also_within_mixed_data(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text('{"input": [1.0], "target": 0}\n')
        lines = Lines(str(tmp_path / "a"), target_key="taget")
        for samples, key in (
            (lines, "target_key"),
            (MixedDataset({"b": lines}), "datasets.b.target_key"),
        ):
            with pytest.raises(ConfigError) as caught:
                read_first_target(self.reader(samples, "drop", inputs=None, targets=None))
            assert caught.value.code == "config.missing_field"
            assert str(caught.value).startswith(
                f"DATA.VALID.{key} = 'taget': its line has no 'taget'; did you mean 'target'? it has 'input', 'target' "
                "(so with each of 1 "
            )


def read_by(samples: Any, on_bad_sample: OnBadSample = "raise") -> SampleReader:
    return SampleReader(
        samples, Pipeline(), COLLATES["stack"](), seed=0, on_bad_sample=on_bad_sample
    )
