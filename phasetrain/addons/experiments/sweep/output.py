"""Prints the results of a sweep and writes them into its folder: `sweep.html`, `results.json`,
`results.csv`, `configs.csv` and plots."""

import logging

from phasetrain.addons.experiments.sweep.group_tables import (
    Table,
    describe_missing,
    format_configs_csv,
    make_difference_table,
    make_mean_table,
)
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.config.addons import find_service
from phasetrain.runs.records import READ_ERRORS
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

MOST_ROWS = 40
"""Rows of the table on the terminal; the files have all of them."""

MOST_CONFIGS = 9
"""Rows of a table of configs that folds or seeds repeat."""

MOST_LINES = 24
"""Lines on the terminal if folds or seeds are swept: the configs come first, then single runs."""

HEADING_LINES = 3
"""Lines of a table besides its rows."""

JSON = "results.json"
CSV = "results.csv"
CONFIGS_CSV = "configs.csv"
PAGE = "sweep.html"


def show_results(results: Results, terminal: Terminal) -> None:
    """Print the table and the errors of failed runs, and write the files."""
    tables = _make_group_tables(results)
    most = MOST_ROWS
    if tables:
        most = MOST_LINES - sum(HEADING_LINES + len(rows) for _, _, rows in tables) - HEADING_LINES
    if most > 0:
        shown, rows = results.make_table(terminal.width, most)
        terminal.print_table(results.title(), shown, rows)
    else:
        shown = []
        terminal.say(results.title())
    for title, columns, rows in tables:
        terminal.print_table(title, columns, rows)
    for line in describe_missing(results.groups):
        terminal.say(line)
    for run in results.list_rows():
        if run.error:
            first_line = run.error.strip().partition("\n")[0]
            terminal.say(f"{run.name} ({run.words}): {first_line}")
    written = write_results(results)
    if written:
        line = f"table and plots: {', '.join(written)}"
        hidden_runs = len(results.runs) - max(most, 0)
        hidden_configs = len(results.groups) - MOST_CONFIGS
        in_tables = {*shown, *(name for _, columns, _ in tables for name in columns)}
        hidden_metrics = len(set(results.metrics) - in_tables)
        hidden = [
            f"{count} more {noun}"
            for count, noun in (
                (hidden_configs, "configs"),
                (hidden_runs, "runs"),
                (hidden_metrics, "metrics"),
            )
            if count > 0
        ]
        if hidden:
            line += f"; {' and '.join(hidden)} there"
        terminal.say(line)


def _make_group_tables(results: Results) -> list[Table]:
    """Return the tables of configs that folds or seeds repeat, with the best configs only."""
    if not results.groups:
        return []
    tables = [make_mean_table(results.groups, results.metric)]
    differences = make_difference_table(results.groups, results.comparison.detect)
    if differences is not None:
        tables.append(differences)
    return [(title, columns, rows[:MOST_CONFIGS]) for title, columns, rows in tables]


def write_results(results: Results) -> list[str]:
    """Write the files and return their paths; log a warning for a file that cannot be written."""
    storage = open_storage(results.folder)
    written = []
    # Called one by one below, so that a page that fails costs neither JSON nor CSV.
    contents = {JSON: results.format_json, CSV: results.format_csv}
    if results.groups:
        contents[CONFIGS_CSV] = lambda: format_configs_csv(results.groups)
    plots: list[str] = []
    # Drawn with the pages and charts of the add-on `report`.
    if find_service("write_report") is not None:
        from phasetrain.addons.experiments.sweep.page import render_sweep, write_plots

        contents = {PAGE: lambda: render_sweep(results), **contents}
        plots = write_plots(results)
    for name, make_content in contents.items():
        path = f"{results.folder}/{name}"
        try:
            storage.replace(path, make_content().encode(errors="replace"), durable=False)
        except READ_ERRORS as error:  # also of the run folders that the page reads
            log.warning("%s cannot be written: %s; re-run the sweep to write it", path, error)
        else:
            written.append(path)
    return [*written, *plots]
