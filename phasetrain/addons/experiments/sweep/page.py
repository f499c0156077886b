"""The page and the plots of a sweep: its metric by each swept value."""

import logging
import time
from collections.abc import Iterable, Sequence

from phasetrain.addons.experiments.fork.draw_tree import draw_tree
from phasetrain.addons.experiments.fork.prefix_tree import TREE_FILE, PrefixTree
from phasetrain.addons.experiments.sweep.charts import make_charts, make_mean_curves
from phasetrain.addons.experiments.sweep.group_tables import (
    Table,
    describe_missing,
    make_difference_table,
    make_mean_table,
    make_needs_table,
)
from phasetrain.addons.experiments.sweep.prune_record import make_rung_table
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.addons.experiments.sweep.sweep_run import SweepRun, name_configs
from phasetrain.addons.report.page.charts import run_charts
from phasetrain.addons.report.page.page import render_page
from phasetrain.addons.report.page.png import write_charts
from phasetrain.addons.report.page.reading import RunReport, read_run
from phasetrain.addons.report.page.svg import draw_figure
from phasetrain.addons.report.page.tiles import badge
from phasetrain.errors import ConfigError
from phasetrain.runtime.html import element, escape_text, table
from phasetrain.runtime.storage import open_storage

log = logging.getLogger(__name__)

COMPARED = 5
"""Number of best runs whose curves are drawn in one plot."""

PLOTS = "plots"
"""Folder of the PNG files."""


def render_sweep(results: Results) -> str:
    """Return the results of a sweep as an HTML page."""
    name = results.folder.rstrip("/").rpartition("/")[2]
    figures = _wrap_figures(draw_figure(chart) for chart in make_charts(results))
    by_value = f"{results.metric} by value"
    sections = {
        "Runs": _render_table(results),
        "Rungs": _render_rungs(results),
        "Shared prefixes": _draw_prefixes(results),
        by_value: figures,
    }
    if results.groups:  # there are more runs than anybody reads
        sections = {**_render_groups(results), by_value: figures, **sections}
    return render_page(
        f"Sweep {name}",
        time.time(),
        summary=element("p", escape_text(results.title()), cls="note"),
        sections=sections | _draw_curves(results),
        has_links=False,
    )


def write_plots(results: Results) -> list[str]:
    """Write the plots as PNG files if matplotlib is installed, and return their folder."""
    charts = make_charts(results)
    try:
        if charts and write_charts(charts, f"{results.folder}/{PLOTS}"):
            return [f"{results.folder}/{PLOTS}"]
        return []
    except ConfigError as error:
        log.debug("no PNG files of the sweep: %s", error)
        return []


def _render_groups(results: Results) -> dict[str, str]:
    """Return the sections about configs that folds or seeds repeat: heading -> HTML."""
    groups = results.groups
    if not groups:
        return {}
    detect = results.comparison.detect
    missing = "".join(
        element("p", escape_text(line), cls="note") for line in describe_missing(groups)
    )
    return {
        "Folds and seeds": _render(make_mean_table(groups, results.metric, is_full=True)) + missing,
        "Differences": _render(make_difference_table(groups, is_full=True)),
        "Seeds needed": _render(make_needs_table(groups, detect)),
    }


def _render(content: Table | None) -> str:
    """Return a table with its title as a note; empty for None."""
    if content is None:
        return ""
    title, head, rows = content
    cells = [list(map(escape_text, row)) for row in rows]
    return element("p", escape_text(title), cls="note") + table(head, cells, cls="configs")


def _render_table(results: Results) -> str:
    rows = []
    for run in results.list_rows():
        *cells, _, name = results.format_cells(run)
        # relative, so that the folder of a sweep can be copied to another machine
        link = element("a", escape_text(name), href=f"{run.name}/report.html")
        rows.append(
            (*map(escape_text, cells), badge(run.state), link, escape_text(run.error[:200]))
        )
    if not any(run.error for run in results.runs):
        return table(results.list_columns(), (row[:-1] for row in rows), cls="wide")
    return table((*results.list_columns(), "error"), rows, cls="wide")


def _draw_prefixes(results: Results) -> str:
    """Return the tree of runs that share their first updates; empty if they do not."""
    path = f"{results.folder}/{TREE_FILE}"
    storage = open_storage(results.folder)
    try:
        content = storage.read_json(path)
        tree = None if content is None else PrefixTree.from_json(content)
    except (TypeError, KeyError, OSError) as error:
        log.warning("%s cannot be read: %s", path, error)  # of another version
        tree = None
    if tree is None:
        return ""
    named = zip(results.runs, name_configs([run.swept for run in results.runs]), strict=True)
    picture = draw_tree(tree, {run.name: label for run, label in named})
    return element("p", escape_text(tree.summarize()), cls="note") + picture


def _render_rungs(results: Results) -> str:
    if results.prune is None:
        return ""
    return _render(make_rung_table(results.prune, results.metric))


def _draw_curves(results: Results) -> dict[str, str]:
    """Return the section with the curves of the best runs, or of the best configs."""
    if results.groups:
        by_name = {run.name: run for run in results.runs}
        best = [group for group in results.groups if group.values][:COMPARED]
        labels = name_configs([group.swept for group in best])
        configs = [
            (label, _read_runs([by_name[name] for name in group.runs]))
            for label, group in zip(labels, best, strict=True)
        ]
        charts = make_mean_curves(configs)
        return {f"Curves of the best {len(best)} configs": _wrap_figures(map(draw_figure, charts))}
    runs = _read_runs([run for run in results.runs if run.best is not None][:COMPARED])
    figures = _wrap_figures(map(draw_figure, run_charts(runs)))
    return {f"Curves of the best {len(runs)} runs": figures}


def _read_runs(runs: Sequence[SweepRun]) -> list[RunReport]:
    """Read the folders of some runs, each named after its swept values."""
    reports = []
    labels = name_configs([run.swept for run in runs])
    for run, label in zip(runs, labels, strict=True):
        try:
            record = read_run(run.folder)
        except ConfigError as error:  # its folder was deleted meanwhile, or it never started
            log.debug("%s is skipped: %s", run.folder, error)
            continue
        record.name = label
        reports.append(record)
    return reports


def _wrap_figures(figures: Iterable[str]) -> str:
    drawn = "".join(figures)
    if drawn:
        return element("div", drawn, cls="charts")
    return ""
