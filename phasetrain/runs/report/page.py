"""A report as one HTML page that needs nothing but itself."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phasetrain.runs.report.charts import charts_of, labels
from phasetrain.runs.report.html import element, escaped
from phasetrain.runs.report.predicted import predictions_section
from phasetrain.runs.report.reading import DAMAGES, RunReport
from phasetrain.runs.report.sections import (
    config_section,
    environment_section,
    final_metrics,
    log_section,
    steps_section,
    times,
)
from phasetrain.runs.report.svg import draw_figure
from phasetrain.runs.report.tiles import runs_table, tiles

ASSETS = Path(__file__).parent
TOP = "top"

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser lets the page load: nothing from anywhere."""


def page(runs: Sequence[RunReport], at: float | None = None) -> str:
    """Return the report of a run, or of several compared.

    Args:
        at: seconds since the epoch, the time of the report; now by default.
    """
    now = time.time() if at is None else at
    names = labels(runs)
    problems = list[str]()
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs compared"
    found = []
    for name, section in _sections(runs, names, now).items():
        try:
            content = section()
        except DAMAGES as error:
            problems.append(f"{name} cannot be shown: {error}")
            continue
        if content:
            found.append((name, content))
    parts = [head(title, now), _problems(runs, names, problems)]
    if found and found[0][0] == TOP:
        parts.append(found.pop(0)[1])
    links = "".join(element("a", escaped(name), href=f"#{_anchor(name)}") for name, _ in found)
    parts.append(element("nav", links))
    parts += [
        element("section", element("h2", escaped(name)) + text, id=_anchor(name))
        for name, text in found
    ]
    return document(title, "".join(parts))


def _sections(
    runs: Sequence[RunReport], names: Sequence[str], now: float
) -> dict[str, Callable[[], str]]:
    alone = len(runs) == 1
    first = runs[0]
    found: dict[str, Callable[[], str]] = {
        TOP: lambda: tiles(first, now) if alone else runs_table(runs, names, now),
        "Final metrics": lambda: final_metrics(runs, names),
        "Curves": lambda: _curves(runs),
        "Where the time went": lambda: times(runs, names),
        "Where the time of steps went": lambda: steps_section(runs, names),
        "Predictions": lambda: predictions_section(first),
        "Config": lambda: config_section(runs, names),
        "Environment": lambda: environment_section(runs, names),
        "Log": lambda: log_section(first),
    }
    return {
        name: section
        for name, section in found.items()
        if alone or name not in ("Predictions", "Log")
    }


def _curves(runs: Sequence[RunReport]) -> str:
    drawn = "".join(draw_figure(chart) for chart in charts_of(runs))
    if not drawn:
        return element(
            "p",
            "No step was logged and no phase was completed, so there is nothing to draw.",
            cls="note",
        )
    note = ""
    if not any("gradient norm" in run.steps for run in runs):
        text = "No gradient norm: it is computed only where OPTIMIZER.clip_norm is set; a large value clips nothing."
        note = element("p", escaped(text), cls="note")
    return element("div", drawn, cls="charts") + note


def head(title: str, now: float) -> str:
    """Return the title of a page and the time of its making, in seconds since the epoch."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    switch = element("button", "light / dark", type="button", id="theme")
    return element(
        "header",
        element("h1", escaped(title)) + element("span", f"report of {at}", cls="note") + switch,
    )


def _problems(runs: Sequence[RunReport], names: Sequence[str], others: Sequence[str]) -> str:
    alone = len(runs) == 1
    found = [
        problem if alone else f"{name}: {problem}"
        for run, name in zip(runs, names, strict=True)
        for problem in run.problems
    ]
    items = "".join(element("li", escaped(problem)) for problem in (*found, *others))
    if items:
        return element("ul", items, cls="problems")
    return ""


def document(title: str, body: str) -> str:
    """Return a page around its content, with style and script in it."""
    style = (ASSETS / "report.css").read_text("utf-8")
    script = (ASSETS / "report.js").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escaped(title)}</title><style>\n{style}</style></head>\n<body><main>{body}</main>"
        f'<div id="tip" hidden></div><script>\n{script}</script></body></html>\n'
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
