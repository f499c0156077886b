"""Shows what came out of a sweep, and writes it into its folder: `sweep.html`, `results.json`,
`results.csv`, plots."""

import logging

from phasetrain.commands.sweep.page import page, plots
from phasetrain.commands.sweep.results import Results
from phasetrain.runs.report.reading import DAMAGES
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

SHOWN = 40
"""Runs in the table on the terminal; all are in the files."""

JSON = "results.json"
CSV = "results.csv"
PAGE = "sweep.html"
"""Names of the files in the sweep folder."""


def show(results: Results, terminal: Terminal) -> None:
    """Print the table, say why runs have failed, and write the files."""
    terminal.print_table(results.title(), *results.table(terminal.width, SHOWN))
    for one in results.runs:
        if one.error:
            words = " ".join(f"{key}={value}" for key, value in one.swept.items())
            terminal.say(f"{one.name} ({words}): {one.error.strip().splitlines()[0]}")
    written = write(results)
    if written:
        more = f"; {len(results.runs) - SHOWN} more runs there" if len(results.runs) > SHOWN else ""
        terminal.say(f"table and plots: {', '.join(written)}{more}")


def write(results: Results) -> list[str]:
    """Write the files and return their paths; what cannot be written is said in a warning."""
    storage = open_storage(results.folder)
    written = []
    contents = {PAGE: lambda: page(results), JSON: results.as_json, CSV: results.as_csv}
    for name, content in contents.items():
        path = f"{results.folder}/{name}"
        try:
            storage.replace(path, content().encode(errors="replace"), durable=False)
        except DAMAGES as error:  # of the folders that they tell of, too
            log.warning("%s cannot be written: %s; the same command writes it anew", path, error)
        else:
            written.append(path)
    return [*written, *plots(results)]
