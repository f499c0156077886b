"""Several datasets as one: proportions hold in every window, and each source is shuffled by itself."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from phasetrain.addons.sampling.mixture import MixedDataset, make_mixed
from phasetrain.addons.sampling.proportional import (
    ProportionalOrder,
    make_proportional,
    round_shares,
    schedule_turns,
)
from phasetrain.data.bad_samples import MissingValueError
from phasetrain.data.datasets import DATASETS, load_digits, make_synthetic
from phasetrain.data.samplers.source import SampleSource
from phasetrain.errors import ConfigError
from phasetrain.testing.build import build_run


class Faulty:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise OSError("gone")


class TestMixed:
    def test_indices_run_through_the_sources(self) -> None:
        data = MixedDataset({"a": ["a0", "a1"], "b": ["b0"], "c": ["c0", "c1"]})
        assert (len(data), [data[index] for index in range(5)]) == (
            5,
            ["a0", "a1", "b0", "c0", "c1"],
        )
        assert [data.locate(index) for index in range(5)] == [
            ("a", 0),
            ("a", 1),
            ("b", 0),
            ("c", 0),
            ("c", 1),
        ]
        with pytest.raises(IndexError, match="index 5 of 5"):
            data[5]

    def test_error_of_a_sample_names_its_source(self) -> None:
        with pytest.raises(ValueError, match=r"1 of 'bad': OSError: gone"):
            MixedDataset({"good": [1, 2], "bad": Faulty()})[3]

    def test_missing_key_of_samples_is_named_with_its_source(self) -> None:
        class Misspelt(Faulty):
            def __getitem__(self, index: int) -> Any:
                raise MissingValueError("target_key = 'taget': there is no 'taget'")

        with pytest.raises(MissingValueError, match=r"^datasets.b.target_key = 'taget'"):
            MixedDataset({"b": Misspelt()})[0]

    def test_labels_facts_and_fingerprint_combine_the_sources(self) -> None:
        train, test = load_digits("train"), load_digits("test")
        data = MixedDataset({"a": train, "b": test})
        assert data.labels().tolist() == [*train.targets.tolist(), *test.targets.tolist()]
        assert data.facts() == train.facts()
        assert data.fingerprint() != MixedDataset({"b": train, "a": test}).fingerprint()
        assert MixedDataset({"a": train, "b": [1, 2]}).facts() == {}

    def test_facts_that_differ_are_omitted_and_other_classes_are_rejected(self) -> None:
        one = make_synthetic(input_shape=[4], classes=3)
        assert (
            "input_shape"
            not in MixedDataset({"a": one, "b": make_synthetic(input_shape=[5], classes=3)}).facts()
        )
        with pytest.raises(
            ValueError,
            match=r"'b'.* 4.* 3.*'a'",
        ):
            MixedDataset({"a": one, "b": make_synthetic(input_shape=[4], classes=4)}).facts()

    def test_source_without_labels_is_named(self) -> None:
        with pytest.raises(TypeError, match=r"'b' \(list\)"):
            MixedDataset({"a": load_digits(), "b": [1]}).labels()

    def test_sources_are_built_from_sections(self) -> None:
        sections = {"a": {"dataset": "digits"}, "b": {"dataset": "digits", "split": "test"}}
        assert make_mixed(sections, split="train").source_lengths == {"a": 1442, "b": 355}

    @pytest.mark.parametrize(
        ("sections", "given"),
        [
            ({}, "datasets = {}:"),
            ({"a": {"split": "test"}}, "datasets.a = {'split': 'test'}:"),
            ({"a": {"dataset": "digit"}}, "datasets.a.name = 'digit':"),
        ],
    )
    def test_bad_sections_are_rejected(self, sections: Any, given: str) -> None:
        with raises(ConfigError, key="DATA.*") as caught:
            DATASETS.build("mixed", {"datasets": sections})
        assert given in str(caught.value)


MIXED_DIGITS = "{dataset: mixed, datasets: {a: {dataset: digits}, b: {dataset: %s}}}"


@pytest.mark.parametrize(
    ("words", "key", "facts"),
    [
        (
            [
                "experiment=digits",
                f"DATA.TEST={MIXED_DIGITS % 'synthetic, input_shape: [1, 8, 8], classes: 3'}",
            ],
            "DATA.TEST",
            r"'b' .*\b3\b.*\b10\b.*'a'",
        ),
        (
            ["experiment=digits", f"DATA.TEST={MIXED_DIGITS % 'digit'}"],
            "DATA.TEST.datasets.b.dataset",
            r"= 'digit' .*'digits'",
        ),
        (
            [
                f"DATA.TRAIN={MIXED_DIGITS % 'digits'}",
                "DATA.TRAIN.sampler={name: proportional, proportions: {c: 1}}",
            ],
            "DATA.TRAIN.sampler",
            r"proportions\.c:.* a, b",
        ),
    ],
)
def test_errors_name_the_split(words: list[str], key: str, facts: str) -> None:
    with raises(ConfigError, key=key) as caught:
        build_run([*words, "PHASES.epochs=1"])
    assert re.search(facts, str(caught.value))


class TestShares:
    @pytest.mark.parametrize(
        ("proportions", "shares"),
        [
            ({"a": 0.7, "b": 0.3}, [7, 3]),
            ({"a": 3, "b": 1.5}, [2, 1]),
            ({"a": 1 / 3, "b": 2 / 3}, [1, 2]),
            ({"a": 5}, [1]),
            ({"a": 0.123456, "b": 0.876544}, [1235, 8765]),
            ({"a": 1e-3, "b": 1, "c": 1}, [1, 1000, 1000]),
        ],
    )
    def test_proportions_are_rounded_to_whole_shares(
        self, proportions: dict[str, float], shares: list[int]
    ) -> None:
        assert round_shares(proportions) == shares

    @pytest.mark.parametrize(
        ("proportions", "message"),
        [
            ({}, "proportions = {}:"),
            ({"a": 0}, "proportions.a = 0:"),
            ({"a": -1.5}, "proportions.a = -1.5:"),
            ({"a": float("inf")}, "proportions.a = inf"),
            ({"a": "much"}, "proportions.a = 'much'"),
            ({"a": True}, "proportions.a = True"),
            ({"a": 1e-6, "b": 1}, "proportions.a = 1e-06:"),
        ],
    )
    def test_bad_proportions_are_rejected(self, proportions: Any, message: str) -> None:
        with pytest.raises(ValueError) as caught:
            round_shares(proportions)
        assert message in str(caught.value)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=7))
def test_turns_are_near_their_shares_at_every_position(shares: list[int]) -> None:
    turns, period = schedule_turns(shares), sum(shares)
    assert np.bincount(turns, minlength=len(shares)).tolist() == shares
    had = np.cumsum(turns[:, None] == np.arange(len(shares)), axis=0)
    due = np.arange(1, period + 1)[:, None] * np.array(shares) / period
    assert abs(had - due).max() <= 1 - 1 / (2 * len(shares) - 2) + 1e-9  # Tijdeman's bound


def test_turns_have_these_values() -> None:
    assert schedule_turns([7, 3]).tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert schedule_turns([1]).tolist() == [0]


class TestProportional:
    SOURCE = SampleSource(MixedDataset({"a": range(70), "b": range(20), "c": range(10)}))
    LABEL = np.repeat([0, 1, 2], [70, 20, 10])

    def order(self, **proportions: float) -> Any:
        return make_proportional(self.SOURCE, proportions, samples=1000)

    @pytest.mark.parametrize("width", [7, 10, 64, 500])
    def test_every_window_has_the_proportions_to_within_two_samples(self, width: int) -> None:
        drawn = self.LABEL[self.order(a=0.2, b=0.3, c=0.5)(100, 4)[0:1000]]
        for begin in range(1000 - width):
            counts = np.bincount(drawn[begin : begin + width], minlength=3)
            assert (abs(counts - width * np.array([0.2, 0.3, 0.5])) < 2).all()

    def test_each_source_is_shuffled_by_itself_in_each_pass(self) -> None:
        found = self.order(a=0.2, b=0.3, c=0.5)(100, 4)[0:1000]
        of_c = found[found >= 90][:500].reshape(-1, 10)
        assert (np.sort(of_c, axis=1) == np.arange(90, 100)).all()
        assert len(np.unique(of_c, axis=0)) == 50

    def test_source_without_a_proportion_is_not_drawn_from(self) -> None:
        assert set(self.LABEL[self.order(a=1, c=1)(100, 4)[0:1000]].tolist()) == {0, 2}

    def test_counts_follow_the_proportions(self) -> None:
        one, other = (
            self.order(a=0.9, b=0.1)(100, 4)[0:1000],
            self.order(a=0.1, b=0.9)(100, 4)[0:1000],
        )
        assert (np.bincount(self.LABEL[one])[0], np.bincount(self.LABEL[other])[0]) == (900, 100)

    def test_distant_position_is_reached_at_once(self) -> None:
        order = ProportionalOrder([(0, 10**9), (10**9, 3)], schedule_turns([9, 1]), 10**12)
        found = order(10**9 + 3, 0)[10**11 : 10**11 + 1000]
        assert (found >= 10**9).sum() == 100
        assert len(set(found[found < 10**9].tolist())) == 900

    @pytest.mark.parametrize(
        ("source", "proportions", "kind", "message"),
        [
            (
                SOURCE,
                {"a": 1, "d": 1},
                ValueError,
                r"proportions\.d:.* a, b, c",
            ),
            (
                SampleSource(range(5)),
                {"a": 1},
                ValueError,
                "sources",
            ),
            (
                SampleSource(SOURCE.dataset, np.arange(3)),
                {"a": 1},
                ValueError,
                "`subset`",
            ),
        ],
    )
    def test_dataset_without_the_sources_is_rejected(
        self, source: SampleSource, proportions: Any, kind: type, message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            make_proportional(source, proportions)
