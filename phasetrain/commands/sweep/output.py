"""Prints the results of a sweep and writes them into its folder: `sweep.html`, `results.json`,
`results.csv` and plots."""

import logging

from phasetrain.commands.sweep.page import render_sweep, write_plots
from phasetrain.commands.sweep.results import Results
from phasetrain.runs.records import READ_ERRORS
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

MOST_ROWS = 40
"""Rows of the table on the terminal; the files have all of them."""

JSON = "results.json"
CSV = "results.csv"
PAGE = "sweep.html"


def show_results(results: Results, terminal: Terminal) -> None:
    """Print the table and the errors of failed runs, and write the files."""
    terminal.print_table(results.title(), *results.make_table(terminal.width, MOST_ROWS))
    if results.groups:
        terminal.print_table(*results.make_group_table())
    for run in results.list_rows():
        if run.error:
            first_line = run.error.strip().partition("\n")[0]
            terminal.say(f"{run.name} ({run.words}): {first_line}")
    written = write_results(results)
    if written:
        line = f"table and plots: {', '.join(written)}"
        hidden = len(results.runs) - MOST_ROWS
        if hidden > 0:
            line += f"; {hidden} more runs there"
        terminal.say(line)


def write_results(results: Results) -> list[str]:
    """Write the files and return their paths; log a warning for a file that cannot be written."""
    storage = open_storage(results.folder)
    written = []
    # Called one by one below, so that a page that fails costs neither JSON nor CSV.
    contents = {
        PAGE: lambda: render_sweep(results),
        JSON: results.format_json,
        CSV: results.format_csv,
    }
    for name, make_content in contents.items():
        path = f"{results.folder}/{name}"
        try:
            storage.replace(path, make_content().encode(errors="replace"), durable=False)
        except READ_ERRORS as error:  # also of the run folders that the page reads
            log.warning("%s cannot be written: %s; re-run the sweep to write it", path, error)
        else:
            written.append(path)
    return [*written, *write_plots(results)]
