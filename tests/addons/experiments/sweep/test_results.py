import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from phasetrain.addons.experiments.sweep.group_tables import format_configs_csv, make_mean_table
from phasetrain.addons.experiments.sweep.override_text import hash_overrides
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun


def results(*runs: SweepRun, monitor: str = "test/accuracy") -> Results:
    return Results("out", monitor, runs)


LONG = results(
    SweepRun(
        "01234567",
        {"OPTIMIZER.lr": "0.12345678901234567", "LOSS": "focal"},
        "finished",
        "test/accuracy",
        0.5,
        44,
    )
)


def test_numbers_are_shown_with_six_digits_and_kept_whole() -> None:
    assert LONG.format_cells(LONG.runs[0])[:3] == ["0.123457", "focal", "0.5000"]
    assert "0.12345678901234567" in LONG.format_csv()
    assert (
        json.loads(LONG.format_json())["runs"][0]["swept"]["OPTIMIZER.lr"] == "0.12345678901234567"
    )


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (None, ["at update", "last", "updates", "time", "state", "folder"]),
        (120, ["at update", "last", "updates", "time", "state", "folder"]),
        (80, ["time", "state", "folder"]),
        (60, ["state"]),
        (40, []),
    ],
)
def test_a_narrow_table_goes_without_columns(width: int | None, columns: list[str]) -> None:
    head, rows = LONG.make_table(width)
    assert head == ["OPTIMIZER.lr", "LOSS", "best test/accuracy", *columns]
    assert [len(row) for row in rows] == [len(head)]


def test_what_json_cannot_hold_is_null() -> None:
    found = results(SweepRun("01234567", {}, "finished", "test/loss", math.inf, 3, math.nan))
    row = json.loads(found.format_json())["runs"][0]
    assert (row["best"], row["last"]) == (None, None)


def test_smaller_is_better_where_the_name_says_so(tmp_path: Path) -> None:
    for name, loss in (("00000001", 2.0), ("00000002", 1.0), ("00000003", 3.0)):
        (tmp_path / name).mkdir()
        line = {
            "kind": "phase",
            "split": "test",
            "epoch": 0,
            "updates": 4,
            "metrics": {"loss": loss},
        }
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        record = {
            "sweep": "s",
            "overrides": [f"A.x={name}"],
            "swept": {"A.x": name},
            "folder": "",
            "exit_code": 0,
        }
        (tmp_path / name).rename(tmp_path / hash_overrides(record["overrides"]))
        (tmp_path / f"{hash_overrides(record['overrides'])}.json").write_text(json.dumps(record))
    found = Results.read(str(tmp_path))
    assert (found.monitor, [one.best for one in found.runs]) == ("-test/loss", [1.0, 2.0, 3.0])
    assert [one.best for one in Results.read(str(tmp_path), "test/loss").runs] == [3.0, 2.0, 1.0]


def test_other_test_metrics_are_those_of_the_best_value(tmp_path: Path) -> None:
    for value in ("1", "2"):
        words = [f"A.x={value}"]
        record = {"sweep": "s", "overrides": words, "swept": {"A.x": value}, "folder": ""}
        folder = tmp_path / hash_overrides(words)
        folder.with_suffix(".json").write_text(json.dumps(record))
        folder.mkdir()
        measured = [
            (4, "train", {"f1": 0.9}),
            (4, "test", {"accuracy": 0.5, "f1": 0.25, "hidden": [1.0]}),
            (4, "other", {"f1": 0.125}),
            (8, "test", {"accuracy": 0.375, "f1": 0.75}),
        ]
        lines = [
            {"kind": "phase", "split": split, "epoch": 0, "updates": updates, "metrics": metrics}
            for updates, split, metrics in measured
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = Results.read(str(tmp_path), "test/accuracy")
    columns, rows = found.make_table()
    assert columns[:4] == ["A.x", "best test/accuracy", "test/f1", "other/f1"]
    assert rows[0][1:5] == ["0.5000", "0.2500", "0.1250", "4"]
    assert json.loads(found.format_json())["runs"][0]["metrics"] == {
        "test/f1": 0.25,
        "other/f1": 0.125,
    }
    head, first, _ = csv.reader(found.format_csv().splitlines())
    assert (head[-2:], first[-2:]) == (["test/f1", "other/f1"], ["0.25", "0.125"])


@pytest.mark.parametrize(
    ("metrics", "width", "columns"),
    [(6, None, 4), (2, 80, 2), (2, 70, 1), (2, 60, 0)],
)
def test_narrow_table_has_fewer_metrics(metrics: int, width: int | None, columns: int) -> None:
    values = {f"test/m{number}": 0.5 for number in range(metrics)}
    run = replace(LONG.runs[0], metrics=values)
    head, rows = results(run).make_table(width)
    assert head[3 : 3 + columns] == list(values)[:columns]
    assert set(head).isdisjoint(list(values)[columns:])
    assert len(rows[0]) == len(head)


@pytest.mark.parametrize(
    ("state", "recorded", "exit_code"),
    [("finished", None, 0), ("paused", None, 0), ("failed", None, None), ("finished", 3, 3)],
)
def test_run_that_ended_after_the_sweep_was_killed_has_an_exit_code(
    tmp_path: Path, state: str, recorded: int | None, exit_code: int | None
) -> None:
    record = {"sweep": "s", "overrides": ["A.x=1"], "swept": {"A.x": "1"}, "folder": ""}
    name = hash_overrides(["A.x=1"])
    (tmp_path / f"{name}.json").write_text(json.dumps({**record, "exit_code": recorded}))
    (tmp_path / name).mkdir()
    (tmp_path / name / "status.json").write_text(json.dumps({"state": state, "updates": 4}))
    (row,) = json.loads(Results.read(str(tmp_path)).format_json())["runs"]
    assert (row["state"], row["exit_code"]) == (state, exit_code)


def test_a_code_says_what_it_means(tmp_path: Path) -> None:
    record = {
        "sweep": "s",
        "overrides": ["A.x=1"],
        "swept": {"A.x": "1"},
        "folder": "",
        "exit_code": 4,
    }
    (tmp_path / "01234567.json").write_text(json.dumps(record))
    (one,) = Results.read(str(tmp_path)).runs
    assert (one.state, one.error) == ("failed", "exit code 4: another process uses the run folder")


def test_the_metric_that_is_asked_for_comes_before_that_of_the_runs(tmp_path: Path) -> None:
    record = {
        "sweep": "s",
        "overrides": ["A.x=1"],
        "swept": {"A.x": "1"},
        "folder": "",
        "exit_code": 0,
    }
    name = hash_overrides(["A.x=1"])
    (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.yaml").write_text(
        "CHECKPOINT:\n  best:\n    monitor: test/accuracy\n"
    )
    measured = {"accuracy": 0.5, "loss": 2.0}
    line = {"kind": "phase", "split": "test", "epoch": 0, "updates": 4, "metrics": measured}
    (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = [Results.read(str(tmp_path), monitor).runs[0] for monitor in ("-test/loss", "")]
    assert [(one.metric, one.best) for one in found] == [("test/loss", 2.0), ("test/accuracy", 0.5)]


def fold_run(name: str, fold: int, best: float | None, **swept: str) -> SweepRun:
    values = {"DATA.VALID.subset.fold": str(fold), **swept}
    return SweepRun(name, values, "finished", "test/accuracy", best, 4, best)


class TestGroups:
    def test_other_metrics_have_mean_and_spread(self) -> None:
        runs = [
            replace(fold_run(str(fold), fold, 0.5), metrics={"test/f1": f1})
            for fold, f1 in enumerate((0.25, 0.75))
        ]
        found = results(*runs)
        _, columns, (row,) = make_mean_table(found.groups, "test/accuracy")
        assert dict(zip(columns, row, strict=True))["test/f1"] == "0.5000 ± 0.3536"
        assert found.groups[0].metrics["test/f1"].mean == 0.5
        head, first = csv.reader(format_configs_csv(found.groups).splitlines())
        assert (head[-2], first[-2]) == ("test/f1 mean", "0.5")

    @pytest.mark.parametrize(
        ("last", "column"),
        [((0.5, 0.25), "0.3750 ± 0.1768"), ((0.75, 0.5), None), ((None, None), None), ((0.5, None), "0.5000")],
    )  # fmt: skip
    def test_last_values_are_shown_if_they_are_not_the_best_ones(
        self, last: tuple[float | None, ...], column: str | None
    ) -> None:
        runs = [
            replace(fold_run(str(fold), fold, best), last=last[fold])
            for fold, best in enumerate((0.75, 0.5))
        ]
        groups = results(*runs).groups
        _, columns, (row,) = make_mean_table(groups, "test/accuracy")
        assert dict(zip(columns, row, strict=True)).get("last") == column
        head, first = csv.reader(format_configs_csv(groups).splitlines())
        mean = groups[0].last.mean
        assert first[head.index("last_mean")] == ("" if mean is None else str(mean))

    @pytest.mark.feature(
        "sweep.intervals",
        "mean, standard deviation and confidence interval, within the bounds of the metric, over "
        "folds and seeds of a sweep",
        "`'RUN.seed=seeds(5)'`, `results.json`",
    )
    @pytest.mark.addon("report")
    def test_folds_are_in_order_with_mean_and_spread_of_each_config(self) -> None:
        from phasetrain.addons.experiments.sweep.page import render_sweep

        found = results(
            fold_run("a", 1, 0.9, LOSS="mse"),
            fold_run("b", 10, 0.8, LOSS="mse"),
            fold_run("c", 0, 0.7, LOSS="l1"),
            fold_run("d", 2, 0.7, LOSS="mse"),
            fold_run("e", 1, None, LOSS="l1"),
        )
        content = json.loads(found.format_json())
        assert [run["name"] for run in content["runs"]] == [*"abcde"]
        fields = ("swept", "over", "runs", "count", "mean", "std")
        assert [[group[name] for name in fields] for group in content["groups"]] == [
            [{"LOSS": "mse"}, ["DATA.VALID.subset.fold"], ["a", "d", "b"], 3, pytest.approx(0.8), pytest.approx(0.1)],
            [{"LOSS": "l1"}, ["DATA.VALID.subset.fold"], ["c", "e"], 1, pytest.approx(0.7), None],
        ]  # fmt: skip
        _, rows = found.make_table()
        assert [row[-1] for row in rows] == [*"adbce"]
        # 4.303 * 0.1 / sqrt(3) around 0.8, and at most 1
        assert make_mean_table(found.groups, "test/accuracy") == (
            "mean and standard deviation over DATA.VALID.subset.fold",
            ["LOSS", "best test/accuracy", "95 % interval", "runs"],
            [["mse", "0.8000 ± 0.1000", "0.5516 to 1.0000", "3/3"], ["l1", "0.7000", "-", "1/2"]],
        )
        page = render_sweep(found)
        assert "<td>mse</td><td>0.8000 ± 0.1000</td><td>0.5516 to 1.0000</td><td>3/3</td>" in page

    def test_groups_with_smaller_mean_come_first_if_smaller_is_better(self) -> None:
        seeds = [
            SweepRun(name, {"RUN.seed": seed, "A.x": x}, "finished", "test/loss", best)
            for name, seed, x, best in (
                ("a", "0", "1", 0.5),
                ("b", "0", "2", 0.1),
                ("c", "1", "2", 0.3),
            )
        ]
        found = results(*seeds, monitor="-test/loss")
        assert [group.swept for group in found.groups] == [{"A.x": "2"}, {"A.x": "1"}]
        assert found.groups[0].mean == pytest.approx(0.2)

    def test_sweep_without_folds_and_seeds_has_none(self) -> None:
        assert LONG.groups == []
        assert json.loads(LONG.format_json())["groups"] == []
