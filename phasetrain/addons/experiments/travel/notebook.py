"""Writes a notebook that restores the state just before a past update (`at --notebook`)."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.travel.at import HELP, open_visit
from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.errors import ConfigError

CLOSE = "close"
"""Name of the function that ends the visit of a notebook."""


def open_in_notebook(
    names: dict[str, Any],
    folder: str,
    update: int,
    *,
    memory_gb: float = 1.0,
    trust: bool = False,
) -> None:
    """Put the variables of the prompt of `at` into the names of a notebook, until `close()`.

    Args:
        names: `globals()` of the notebook; a visit in them is ended first.
        folder: the run folder.
        update: the update, from 1.
        memory_gb: memory for states to which `back` and `goto` return without training, in GiB.
        trust: run the code that the config of the run names.
    """
    if CLOSE in names:
        names[CLOSE]()
    stack = ExitStack()
    stack.enter_context(open_visit(names, folder, update, memory_gb=memory_gb, trust=trust))
    names[CLOSE] = stack.close


def write_notebook(path: str, folder: str, update: int, *, memory_gb: float, trust: bool) -> None:
    """Write a notebook in the format 4.5 of Jupyter.

    Raises:
        ConfigError: the run has not made the update (code `at.no_such_update`), or the file is
            there or cannot be written (code `at.notebook`).
    """
    with open_past_run(folder, trust=trust) as past:
        past.check_update(update)
    arguments = f"globals(), {str(Path(folder).absolute())!r}, {update}"
    options = "".join([f", memory_gb={memory_gb}" * (memory_gb != 1), f", trust={trust}" * trust])
    cells = [
        _make_cell("markdown", [f"# Before update {update} of {folder}", "", *HELP.splitlines()]),
        _make_cell(
            "code",
            [
                f"from {__name__} import open_in_notebook",
                "",
                f"open_in_notebook({arguments}{options})",
            ],
        ),
        _make_cell("code", ["report = step()", "report"]),
        _make_cell("code", ["diff(update - 1)"]),
        _make_cell("code", ["back()"]),
        _make_cell("code", [f"{CLOSE}()"]),
    ]
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    except OSError as error:
        raise ConfigError(
            f"--notebook {path}: it cannot be written: {error.strerror or error}; expected the "
            "path of a new file",
            code="at.notebook",
        ) from error


def _make_cell(kind: str, lines: Sequence[str]) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": "\n".join(lines)}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell
