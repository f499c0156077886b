"""Formatting of values for people."""

import math

import pytest

from phasetrain.runtime.format import (
    format_bytes,
    format_count,
    format_duration,
    format_duration_range,
    format_metric,
    format_percent,
    format_si,
    format_timestamp,
    join_first,
    shorten,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (1.24, "1.2 s"), (59.94, "59.9 s"), (59.97, "1 min 00 s"), (60, "1 min 00 s"),
     (185.4, "3 min 05 s"), (3600, "1 h 00 min"), (7805, "2 h 10 min"), (90_000, "25 h 00 min"), (700_000, "8 d 02 h")],
)  # fmt: skip
def test_duration_has_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (0.99716, "0.9972"), (-2.5, "-2.5000"), (1e-5, "1e-05"), (123456.7, "1.235e+05"),
     (math.nan, "nan"), (math.inf, "inf")],
)  # fmt: skip
def test_metric_has_four_digits(value: float, text: str) -> None:
    assert format_metric(value) == text


def test_sizes_and_counts_have_units() -> None:
    sizes = [format_bytes(size) for size in (8424, 31.4 * 2**20, 2**31)]
    assert sizes == ["8,424 bytes", "31.4 MiB", "2.0 GiB"]
    counts = [format_si(count) for count in (12, 1.5e3, 2e6, 4.1e9, 3e12)]
    assert counts == ["12", "1.5 k", "2 M", "4.1 G", "3 T"]


def test_percentage_of_an_unknown_whole_is_empty() -> None:
    assert [format_percent(0.853), format_percent(1, 4), format_percent(1, 0)] == [
        "85 %",
        "25 %",
        "",
    ]


def test_damaged_timestamp_is_empty() -> None:
    assert [format_timestamp(at) for at in (0, -1.0, math.nan, 1e300)] == [""] * 4
    assert format_timestamp(1.7e9).startswith("2023-11-1")


def test_long_text_is_cut_to_its_length() -> None:
    assert [shorten("abcdef", 6), shorten("abcdefg", 6)] == ["abcdef", "abc..."]


def test_first_items_are_joined_and_the_others_counted() -> None:
    assert join_first([1, 2], 2) == "1, 2"
    assert join_first(range(2000), 2) == "0, 1 and 1,998 more"
    assert [join_first([], 2), join_first([], 2, empty="nothing")] == ["none", "nothing"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (9, 14, "5 to 15 s"),
        (10, 15, "10 to 15 s"),
        (130, 290, "2 to 5 min"),
        (200, 201, "3 to 4 min"),
        (180, 180, "3 min"),
        (7000, 9000, "115 to 150 min"),
        (40_000, 50_000, "11 to 14 h"),
    ],
)
def test_duration_range_is_in_round_numbers(low: float, high: float, text: str) -> None:
    assert format_duration_range(low, high) == text


def test_nouns_are_in_the_plural_unless_there_is_one() -> None:
    counts = [
        (1, "epoch"),
        (2, "epoch"),
        (0, "update"),
        (1442, "sample"),
        (2, "batch"),
        (3, "process"),
    ]
    assert [format_count(*one) for one in counts] == [
        "1 epoch",
        "2 epochs",
        "0 updates",
        "1,442 samples",
        "2 batches",
        "3 processes",
    ]
