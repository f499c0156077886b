"""The page as a whole: self-contained, and sensible whatever is missing."""

import re
from pathlib import Path

import pytest

from phasetrain.addons.report.page import read_run, render_report
from phasetrain.addons.report.page.reading import PredictionsRecord, RunReport
from phasetrain.runs.records import (
    EnvironmentRecord,
    PlanRecord,
    StatusRecord,
)

EVIL = "<script>alert('x')</script>"


def headings(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_sections_of_a_run(run_folder: Path) -> None:
    text = render_report([read_run(str(run_folder))])
    assert headings(text) == [
        "Final metrics", "Curves", "Where the time went", "Predictions", "Config", "Environment", "Log",
    ]  # fmt: skip
    assert re.findall(r'id="chart-([a-z-]*)"', text) == [
        "accuracy", "loss", "train-loss", "train-lr", "train-gradient-norm", "train-samples-s",
    ]  # fmt: skip
    assert "No gradient norm" not in text
    assert 'class="problems"' not in text


@pytest.mark.feature(
    "report",
    "HTML report; comparisons; plots",
    "`report.html`, `HOOKS.report`, `phasetrain report`",
)
def test_it_takes_nothing_from_anywhere(run_folder: Path) -> None:
    text = render_report([read_run(str(run_folder))])
    addresses = re.findall(r'\b(?:src|href)="([^"]*)"', text) + re.findall(
        r"url\(([^)]*)\)|@import", text
    )
    assert addresses
    assert {address.split(",")[0][:14] for address in addresses if not address.startswith("#")} == {
        "data:image/png"
    }
    assert "default-src 'none'" in text


def test_two_runs_compared(run_folder: Path) -> None:
    run = read_run(str(run_folder))
    other = RunReport("runs/other")
    other.config = {"PHASES": {"epochs": 4}}
    text = render_report([run, other])
    assert "<h1>2 runs compared</h1>" in text
    assert headings(text) == [
        "Final metrics",
        "Curves",
        "Where the time went",
        "Config",
        "Environment",
    ]
    assert "<code>PHASES.epochs</code></td><td><code>3</code></td><td><code>4</code>" in text


def test_a_run_without_metrics() -> None:
    text = render_report([RunReport("runs/a")])
    assert "nothing to draw" in text
    assert "nothing was measured" in text


def test_how_to_get_a_gradient_norm(run_folder: Path) -> None:
    run = read_run(str(run_folder))
    del run.steps["gradient norm"]
    assert "computed only if OPTIMIZER.clip_norm is set" in render_report([run])


def test_nothing_of_a_run_folder_becomes_a_part_of_the_page(run_folder: Path) -> None:
    run = read_run(str(run_folder))
    clean = render_report([run]).count("<script")
    run.name = run.path = EVIL
    run.metrics = {EVIL: {EVIL: run.metrics["accuracy"]["test"]}}
    run.steps[EVIL] = run.steps["loss"]
    run.status = StatusRecord.from_json(
        {"state": EVIL, "reason": EVIL, "digest": EVIL, "attempt": EVIL}
    )
    run.config = {EVIL: EVIL}
    run.environment = EnvironmentRecord.from_json({EVIL: {EVIL: EVIL}, "device": EVIL})
    run.plan = PlanRecord(differs=((EVIL, EVIL, EVIL),))
    run.log = [EVIL]
    run.problems = [EVIL]
    sample = {"label": EVIL, "prediction": EVIL, "image": EVIL, "index": EVIL}
    content = {"updates": 1, "classes": [EVIL], "confusion": [[1]], "first": [sample]}
    run.predictions = {EVIL: PredictionsRecord.from_json(content)}
    text = render_report([run])
    charts = text.count('class="chart"')
    assert text.count("<script") == charts + 1
    assert clean == 6 + 1  # the same without it
    assert "<script>alert" not in text


@pytest.mark.parametrize("name", ["status", "environment", "plan", "predictions"])
def test_content_of_the_wrong_kind_costs_its_section_and_is_told(
    run_folder: Path, name: str
) -> None:
    run = read_run(str(run_folder))
    setattr(run, name, 7)
    text = render_report([run])
    assert "cannot be shown" in text
    assert "Curves" in headings(text)
