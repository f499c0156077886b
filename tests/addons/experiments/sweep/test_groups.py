"""Configs that a sweep repeats with several seeds: intervals and paired differences."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest
from raising import raises

from phasetrain.addons.experiments.sweep.group_tables import (
    choose_sizes,
    describe_missing,
    format_configs_csv,
    make_difference_table,
    make_mean_table,
    make_needs_table,
)
from phasetrain.addons.experiments.sweep.groups import (
    Comparison,
    ComparisonSettings,
    check_comparison,
    find_config,
)
from phasetrain.addons.experiments.sweep.override_text import SweepOverrides
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun
from phasetrain.errors import ConfigError

# Both configs rise with the seed by about 0.1, and differ by 0.02, 0.03, 0.01 and 0.02.
FIRST = (0.50, 0.60, 0.70, 0.80)
SECOND = (0.48, 0.57, 0.69, 0.78)


def make_runs(lr: str, values: tuple[float | None, ...], **changes: object) -> list[SweepRun]:
    return [
        replace(
            SweepRun(
                f"{lr}-{seed}",
                {"OPTIMIZER.lr": lr, "RUN.seed": str(seed)},
                "finished" if value is not None else "failed",
                "test/accuracy",
                value,
            ),
            **changes,  # type: ignore[arg-type]
        )
        for seed, value in enumerate(values)
    ]


def make_results(
    *configs: tuple[float | None, ...], comparison: ComparisonSettings | None = None
) -> Results:
    """Return results of configs with the learning rates 0.1, 0.2, ..."""
    runs = [
        run for place, values in enumerate(configs, 1) for run in make_runs(f"0.{place}", values)
    ]
    return Results("out", "test/accuracy", runs, comparison=comparison or ComparisonSettings())


def read_difference(results: Results, place: int = 1) -> Comparison:
    difference = results.groups[place].difference
    assert difference is not None
    return difference


@pytest.mark.feature(
    "sweep.pairs",
    "paired differences between configs with the same seeds, and seeds needed",
    "`phasetrain sweep --baseline --detect`",
)
def test_differences_are_paired_by_seed() -> None:
    results = make_results(FIRST, SECOND)
    assert [group.is_baseline for group in results.groups] == [True, False]
    assert results.groups[0].difference is None
    difference = read_difference(results)
    assert difference.pairs == 4
    assert difference.mean == pytest.approx(-0.02)
    # the standard deviation of 2, 3, 1, 2 is sqrt(2 / 3), and 3.182 the quantile of t
    assert difference.std == pytest.approx(0.0081650, abs=1e-7)
    assert difference.low == pytest.approx(-0.02 - 3.18245 * 0.0081650 / 2, abs=1e-6)
    assert difference.high == pytest.approx(-0.02 + 3.18245 * 0.0081650 / 2, abs=1e-6)
    assert difference.p_value == pytest.approx(0.0163, abs=1e-4)
    assert difference.p_adjusted == difference.p_value
    assert difference.correlation == pytest.approx(0.9983, abs=1e-4)
    # (2 / 3e-4) over 0.016667 + 0.0174
    assert difference.variance_ratio == pytest.approx(0.001957, abs=1e-5)
    assert difference.pairs_needed == 4


def test_unpaired_values_would_not_tell_the_configs_apart() -> None:
    groups = make_results(FIRST, SECOND).groups
    assert groups[0].low is not None
    assert groups[1].high is not None
    assert groups[0].low < groups[1].high


def test_values_are_held_by_seed_in_json() -> None:
    results = make_results(FIRST, SECOND, comparison=ComparisonSettings(detect=0.01))
    content = json.loads(results.format_json())
    assert content["detect"] == 0.01
    best, other = content["groups"]
    assert best["values"] == {f"RUN.seed={seed}": value for seed, value in enumerate(FIRST)}
    assert (best["missing"], best["is_baseline"], best["difference"]) == ({}, True, None)
    assert best["stderr"] == pytest.approx(best["std"] / 2)
    assert best["low"] < best["mean"] < best["high"]
    assert other["difference"]["pairs_to_detect"] == 8
    assert set(other["difference"]) == {
        "pairs", "mean", "std", "stderr", "low", "high", "p_value", "p_adjusted", "correlation",
        "variance_ratio", "pairs_needed", "pairs_to_detect",
    }  # fmt: skip


def test_pairs_are_made_of_the_seeds_that_both_configs_have() -> None:
    results = make_results(
        (0.5, 0.6, None, math.inf),
        (None, 0.57, 0.5, 0.3),
        comparison=ComparisonSettings(("OPTIMIZER.lr=0.1",)),
    )
    first, second = results.groups
    assert first.values == {"RUN.seed=0": 0.5, "RUN.seed=1": 0.6}
    assert first.missing == {"RUN.seed=2": "failed", "RUN.seed=3": "finished"}
    difference = read_difference(results)
    assert (difference.pairs, difference.p_value) == (1, None)
    assert difference.mean == pytest.approx(-0.03)
    assert describe_missing([first, second]) == [
        "no value of OPTIMIZER.lr=0.1 for RUN.seed=2 (failed), RUN.seed=3 (finished)",
        "no value of OPTIMIZER.lr=0.2 for RUN.seed=0 (failed)",
    ]


def test_seeds_that_only_other_configs_have_are_missing() -> None:
    runs = [*make_runs("0.1", FIRST), *make_runs("0.2", SECOND[:2])]
    groups = Results("out", "test/accuracy", runs).groups
    by_config = {group.words: group for group in groups}
    assert by_config["OPTIMIZER.lr=0.2"].missing == {
        "RUN.seed=2": "not swept",
        "RUN.seed=3": "not swept",
    }
    assert [group.count for group in groups] == [4, 2]


def test_config_with_failed_seeds_is_no_baseline_by_default() -> None:
    # without its worst seed, the second config has the better mean
    results = make_results(FIRST, (None, 0.57, 0.69, 0.78))
    assert [group.words for group in results.groups] == ["OPTIMIZER.lr=0.2", "OPTIMIZER.lr=0.1"]
    assert [group.is_baseline for group in results.groups] == [False, True]
    assert read_difference(results, 0).mean == pytest.approx(-0.02)


@pytest.mark.addon("report")
def test_config_without_any_value_is_last_and_compared_with_nothing() -> None:
    from phasetrain.addons.experiments.sweep.page import render_sweep

    results = make_results((None, None), (0.5, 0.6))
    assert [group.mean for group in results.groups] == [pytest.approx(0.55), None]
    assert read_difference(results) == Comparison(0)
    assert make_difference_table(results.groups) is None
    assert make_needs_table(results.groups) is None
    assert "<h2>Differences</h2>" not in render_sweep(results)


def test_named_baseline_is_compared_with_better_configs() -> None:
    results = make_results(
        FIRST, SECOND, comparison=ComparisonSettings(baseline=("OPTIMIZER.lr=2e-1",))
    )
    assert [group.is_baseline for group in results.groups] == [False, True]
    assert read_difference(results, 0).mean == pytest.approx(0.02)
    table = make_difference_table(results.groups)
    assert table is not None
    title, columns, rows = table
    assert title == "difference from OPTIMIZER.lr=0.2, paired by RUN.seed"
    assert columns == [
        "OPTIMIZER.lr",
        "difference",
        "95 % interval",
        "p (Holm)",
        "pairs",
        "seeds needed",
    ]
    assert rows == [["0.1", "+0.0200", "0.0070 to 0.0330", "0.0163", "4", "4"]]


def test_p_values_are_corrected_for_the_number_of_configs() -> None:
    results = make_results(FIRST, SECOND, (0.2, 0.3, 0.4, 0.49))
    differences = [read_difference(results, place) for place in (1, 2)]
    assert differences[0].p_adjusted == differences[0].p_value
    assert differences[1].p_value is not None
    assert differences[1].p_adjusted == pytest.approx(2 * differences[1].p_value)


def test_smaller_values_are_better_for_a_loss() -> None:
    runs = [
        *make_runs("0.1", FIRST, metric="test/loss"),
        *make_runs("0.2", SECOND, metric="test/loss"),
    ]
    groups = Results("out", "-test/loss", runs).groups
    assert [group.words for group in groups] == ["OPTIMIZER.lr=0.2", "OPTIMIZER.lr=0.1"]
    assert groups[1].difference is not None
    assert groups[1].difference.mean == pytest.approx(0.02)


def test_seeds_alone_have_a_mean_and_nothing_to_compare() -> None:
    runs = [
        SweepRun(str(seed), {"RUN.seed": str(seed)}, "finished", "test/accuracy", value)
        for seed, value in enumerate(FIRST)
    ]
    groups = Results("out", "test/accuracy", runs).groups
    assert make_mean_table(groups, "test/accuracy")[2] == [
        ["0.6500 ± 0.1291", "0.4446 to 0.8554", "4/4"]
    ]
    assert make_difference_table(groups) is None


def test_table_shows_the_seeds_for_a_given_difference() -> None:
    results = make_results(FIRST, SECOND, comparison=ComparisonSettings(detect=0.01))
    table = make_difference_table(results.groups, 0.01)
    assert table is not None
    assert table[1][-1] == "seeds for 0.01"
    assert table[2] == [["0.2", "-0.0200", "-0.0330 to -0.0070", "0.0163", "4", "8"]]
    needs = make_needs_table(results.groups, 0.01)
    assert needs is not None
    assert needs[1:] == (
        ["OPTIMIZER.lr", "0.005", "0.01", "0.02", "0.05"],
        [["0.2", "23", "8", "4", "3"]],
    )


@pytest.mark.parametrize(
    ("std", "sizes"), [(0.0082, [0.005, 0.01, 0.02, 0.05]), (4.0, [1.0, 2.0, 5.0, 10.0])]
)
def test_sizes_of_differences_are_round(std: float, sizes: list[float]) -> None:
    assert choose_sizes(std) == sizes


def test_equal_configs_need_no_number_of_seeds() -> None:
    table = make_difference_table(make_results(FIRST, FIRST).groups)
    assert table is not None
    assert table[2] == [["0.2", "0.0000", "0.0000 to 0.0000", "1.0000", "4", "-"]]


def test_csv_has_a_row_per_config() -> None:
    rows = list(csv.DictReader(io.StringIO(format_configs_csv(make_results(FIRST, SECOND).groups))))
    assert [row["OPTIMIZER.lr"] for row in rows] == ["0.1", "0.2"]
    assert [row["is_baseline"] for row in rows] == ["True", "False"]
    assert float(rows[0]["mean"]) == pytest.approx(0.65)
    assert (rows[0]["difference_mean"], rows[1]["difference_pairs"]) == ("", "4")


@pytest.mark.addon("report")
def test_plots_have_the_interval_of_each_mean_and_difference() -> None:
    from phasetrain.addons.experiments.sweep.charts import make_charts

    by_lr, differences = make_charts(make_results(FIRST, SECOND))
    dots, means = by_lr.lines
    assert (dots.label, len(dots.curve.x), dots.joined) == ("single runs", 8, False)
    assert means.curve.y.tolist() == pytest.approx([0.65, 0.63])
    assert means.low is not None
    assert means.low[0] == pytest.approx(0.4446, abs=1e-4)
    assert differences.name == "differences"
    assert differences.lines[1].curve.y.tolist() == pytest.approx([-0.02])
    assert differences.axis is not None
    assert list(differences.axis.marks) == [2.0]


@pytest.mark.addon("report")
def test_page_has_means_differences_and_seeds_needed_before_the_runs() -> None:
    from phasetrain.addons.experiments.sweep.page import render_sweep

    text = render_sweep(make_results(FIRST, SECOND))
    headings = ["Folds and seeds", "Differences", "Seeds needed", "test/accuracy by value", "Runs"]
    places = [text.index(f"<h2>{heading}</h2>") for heading in headings]
    assert places == sorted(places)
    assert text.count('class="whisker"') == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["A.x=1"], None),
        (["A.x=1", "LOSS=mse"], {"A.x": "1.0", "LOSS": "mse"}),
        (["LOSS='l1'"], {"A.x": "1.0", "LOSS": "l1"}),
        (["LOSS=focal"], None),
        (["B.y=1"], None),
    ],
)
def test_config_is_found_by_values_that_only_it_has(
    words: list[str], expected: dict[str, str] | None
) -> None:
    configs = [{"A.x": "1.0", "LOSS": "mse"}, {"A.x": "1.0", "LOSS": "l1"}]
    assert find_config(configs, words) == expected


@pytest.mark.parametrize(
    ("settings", "words", "code"),
    [
        (ComparisonSettings(("A.x=3",)), ["A.x=1,2", "RUN.seed=seeds(2)"], "sweep.baseline"),
        (ComparisonSettings(("A.x=1",)), ["A.x=1,2"], "sweep.baseline"),
        (ComparisonSettings(("A.x=1",)), ["A.x=1,2", "RUN.seed=seeds(2)", "hydra/sweeper=optuna"], "sweep.baseline"),
        (ComparisonSettings(detect=-1.0), ["A.x=1,2", "RUN.seed=seeds(2)"], "sweep.detect"),
        (ComparisonSettings(detect=0.1), ["A.x=1,2"], "sweep.detect"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_sweep_are_rejected(
    settings: ComparisonSettings, words: list[str], code: str
) -> None:
    with raises(ConfigError, code=code):
        check_comparison(settings, SweepOverrides.read(words))
