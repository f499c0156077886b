"""A report as one HTML page that loads nothing from anywhere."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phasetrain.addons.report.page.charts import label_runs, run_charts
from phasetrain.addons.report.page.predicted import predictions_section
from phasetrain.addons.report.page.reading import RunReport
from phasetrain.addons.report.page.sections import (
    attempts_section,
    config_section,
    deviations_section,
    environment_section,
    log_section,
    metrics_section,
    steps_section,
)
from phasetrain.addons.report.page.spikes import spikes_section
from phasetrain.addons.report.page.svg import draw_figure
from phasetrain.addons.report.page.tiles import runs_table, tiles_section
from phasetrain.runs.records import READ_ERRORS
from phasetrain.runtime.format import format_timestamp
from phasetrain.runtime.html import element, escape_text

ASSETS = Path(__file__).parent
SUMMARY = "Summary"

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "media-src data:"
)
"""Content security policy: a browser loads nothing that is not in the page."""


def render_report(runs: Sequence[RunReport], at: float | None = None) -> str:
    """Return the report of a run, or of several compared.

    Args:
        runs: the runs.
        at: time of the report, in seconds since 1970; now by default.
    """
    now = time.time() if at is None else at
    names = label_runs(runs)
    failed = []
    contents = {}
    for name, make_section in _section_makers(runs, names, now).items():
        try:
            contents[name] = make_section()
        except READ_ERRORS as error:
            # A damaged file costs its section: the report of a failed run is needed most.
            failed.append(f"{name} cannot be shown: {error}")
    # after the sections: making them finds further problems
    if len(runs) == 1:
        title = f"Run {names[0]}"
        problems = runs[0].problems
    else:
        title = f"{len(runs)} runs compared"
        problems = [
            f"{name}: {problem}"
            for run, name in zip(runs, names, strict=True)
            for problem in run.problems
        ]
    return render_page(
        title,
        now,
        summary=contents.pop(SUMMARY, ""),
        sections=contents,
        problems=[*problems, *failed],
    )


def render_page(
    title: str,
    at: float,
    *,
    summary: str,
    sections: Mapping[str, str],
    problems: Sequence[str] = (),
    has_links: bool = True,
) -> str:
    """Return a page with style and script in it.

    Args:
        title: heading of the page.
        at: time of the page, in seconds since 1970.
        summary: HTML at the top.
        sections: heading -> HTML; empty ones are omitted.
        problems: sentences for the reader.
        has_links: whether there are links to the sections.
    """
    # Imported here: 0.2 s that the start of a training, which registers the report hook, need not
    # spend.
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["anchor"] = lambda name: name.lower().replace(" ", "-")
    return environment.get_template("page.html").render(
        title=title,
        at=format_timestamp(at),
        # Markup marks text that Jinja must not escape again; `title` and `problems` hold text of
        # run folders and stay plain.
        policy=Markup(POLICY),
        style=Markup((ASSETS / "report.css").read_text("utf-8")),
        script=Markup((ASSETS / "report.js").read_text("utf-8")),
        summary=Markup(summary),
        sections={name: Markup(content) for name, content in sections.items() if content},
        problems=problems,
        has_links=has_links,
    )


def _section_makers(
    runs: Sequence[RunReport], names: Sequence[str], now: float
) -> dict[str, Callable[[], str]]:
    first = runs[0]
    shared: dict[str, Callable[[], str]] = {
        "Final metrics": lambda: metrics_section(runs, names),
        "Curves": lambda: _curves_section(runs),
        "Where the time went": lambda: attempts_section(runs, names),
        "Where the step time went": lambda: steps_section(runs, names),
    }
    settings: dict[str, Callable[[], str]] = {
        "Config": lambda: config_section(runs, names),
        "Environment": lambda: environment_section(runs, names),
    }
    if len(runs) > 1:
        return {SUMMARY: lambda: runs_table(runs, names, now), **shared, **settings}
    return {
        SUMMARY: lambda: tiles_section(first, now),
        "Not exact": lambda: deviations_section(first),
        **shared,
        "Spikes": lambda: spikes_section(first),
        "Media": lambda: _media_section(first),
        "Predictions": lambda: predictions_section(first),
        **settings,
        "Log": lambda: log_section(first),
    }


def _media_section(run: RunReport) -> str:
    if not any(line.kind == "media" for line in run.lines):
        return ""
    from phasetrain.addons.report.page.media import media_section

    return media_section(run)


def _curves_section(runs: Sequence[RunReport]) -> str:
    drawn = "".join(draw_figure(chart) for chart in run_charts(runs))
    if not drawn:
        text = "No step was logged and no phase was completed, so there is nothing to draw."
        return element("p", text, cls="note")
    note = ""
    if not any("gradient norm" in run.steps for run in runs):
        text = (
            "No gradient norm: it is computed only if OPTIMIZER.clip_norm is set. To see it "
            "without clipping, set a norm that is never reached, such as 1e9."
        )
        note = element("p", escape_text(text), cls="note")
    return element("div", drawn, cls="charts") + note
