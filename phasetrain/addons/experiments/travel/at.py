"""Restores the state just before a past update, for a prompt, a script or a notebook
(`phasetrain at`)."""

import code
import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.options import AtOptions
from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.script import read_script, run_script
from phasetrain.addons.experiments.travel.visit import Visit, limit_verdict
from phasetrain.cli.output import Outcome
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import format_count

log = logging.getLogger(__name__)

HELP = """\
task, model, optimizer, batches, config: the run just before this update
step()   train the update: loss, gradient norm, the tensors that it changes
back(n)  go back n updates      goto(n)  restore the state just before update n
diff(n)  how tensors differ from the state just before update n
goto and back restore the state of the run: your changes are lost, and nothing is written."""


def visit_update(
    folder: str, options: AtOptions, *, update: int, has_prompt: bool = True
) -> Outcome:
    """Restore the state just before a past update, and run a script or open a prompt with it, or
    write a notebook that restores it.

    The exit code is 1 if an update that was trained again differs from the ledger.

    Args:
        folder: the run folder; it is only read.
        options: what to do with the state.
        update: the update, from 1.
        has_prompt: whether to open a prompt if there is no script.

    Raises:
        ConfigError: there is no such run, update (code `at.no_such_update`) or script
            (`at.no_script`), or the notebook cannot be written (`at.notebook`).
        ChangedError: config or data differ from the run.
    """
    if options.notebook is not None:
        return _write_notebook(options.notebook, folder, update, options)
    script = options.script and read_script(options.script, "--script", "at.no_script")
    names: dict[str, Any] = {"__name__": "__main__", "__file__": options.script}
    with open_visit(names, folder, update, options.memory, trust=options.trust) as visit:
        content = describe_visit(visit)
        text = _format_visit(content)
        if script:
            for line in text.splitlines():
                log.info(line)
            run_script(script, names)
            content["summary"] = names.get("summary")
            text = ""
        elif has_prompt:
            with suppress(ImportError):  # for line editing; not available on every system
                importlib.import_module("readline")
            with suppress(SystemExit):  # exit() and quit()
                code.interact(f"{text}\n{HELP}", local=names, exitmsg="")
            text = ""
    return Outcome(int(content["difference"] is not None), text, content)


@contextmanager
def open_visit(
    names: dict[str, Any], folder: str, update: int, memory_gb: float = 1.0, *, trust: bool = False
) -> Iterator[Visit]:
    """Open a run just before an update, and put the variables of a prompt into `names` after each
    move.

    Args:
        names: gets the objects of the run, and the functions that move.
        folder: the run folder; it is only read.
        update: the update, from 1.
        memory_gb: memory for states to which `back` and `goto` return without training, in GiB.
        trust: run the code that the config of the run names.
    """

    def set_names(visit: Visit) -> None:
        task = visit.task
        names.update(
            visit=visit,
            task=task,
            model=task.model,
            optimizer=task.updater.optimizer,
            batches=visit.batches,
            config=task.config,
            update=visit.update,
            step=visit.step,
            back=visit.back,
            goto=visit.goto,
            diff=visit.diff,
        )

    memory = int(memory_gb * 2**30)
    with (
        open_past_run(folder, trust=trust) as past,
        Visit(past, update, memory=memory, moved=set_names) as visit,
    ):
        yield visit


def describe_visit(visit: Visit) -> dict[str, Any]:
    """Return the position of a visit and how it was reached, for programs."""
    past = visit.past
    state = visit.engine.state
    record = past.ledger.get(visit.update)
    difference = visit.first_difference
    return {
        "run": past.folder.path,
        "update": visit.update,
        "epoch": visit.engine.plan.phases[state.phase].epoch if visit.batches else None,
        "phase": state.phase,
        "step": state.step,
        "samples": [index for batch in visit.batches for index in batch.ids.tolist()],
        "recorded": record and {"loss": record.loss, "lr": record.lr, "samples": record.samples},
        "began": visit.began,
        "replayed": visit.replayed,
        "checked": visit.checked,
        "compared": list(past.components),
        "difference": difference and {"update": difference[0], "components": list(difference[1])},
    }


def _format_visit(content: Mapping[str, Any]) -> str:
    position = ", at the end of the run"
    if content["epoch"] is not None:
        samples = format_count(len(content["samples"]), "sample")
        position = f": epoch {content['epoch']}, {samples}"
    verdict = ""
    if content["difference"] is not None:
        first = content["difference"]
        verdict = (
            f"; update {first['update']} is the first that DIFFERS from the ledger: "
            f"{', '.join(first['components'])}. This is not the state of the run"
        )
    elif content["checked"]:
        limit = limit_verdict(content["compared"]) or " bit for bit"
        verdict = f", {content['checked']} equal the ledger{limit}"
    elif content["replayed"]:
        verdict = ", none of them in the ledger"
    return (
        f"before update {content['update']} of {content['run']}{position}\n"
        f"{format_count(content['replayed'], 'update')} trained again{verdict}"
    )


def open_in_notebook(names: dict[str, Any], *visit: Any, **options: Any) -> None:
    """Put the variables of the prompt of `at` into the names of a notebook, until `close()`.

    Args:
        names: `globals()` of the notebook; a visit in them is ended first.
        visit, options: see `open_visit`.
    """
    if "close" in names:
        names["close"]()
    stack = ExitStack()
    stack.enter_context(open_visit(names, *visit, **options))
    names["close"] = stack.close


def _write_notebook(path: str, folder: str, update: int, options: AtOptions) -> Outcome:
    """Write a notebook in the format 4.5 of Jupyter."""
    with open_past_run(folder, trust=options.trust) as past:
        past.check_update(update)
    opening = (
        f"from {__name__} import open_in_notebook\n\n"
        f"open_in_notebook(globals(), {str(Path(folder).absolute())!r}, {update}, "
        f"{options.memory}, trust={options.trust})"
    )
    sources = (opening, "report = step()\nreport", "diff(update - 1)", "back()", "close()")
    unused: dict[str, Any] = {"execution_count": None, "metadata": {}, "outputs": []}
    heading = f"# Before update {update} of {folder}\n\n{HELP}"
    content = {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": heading},
            *({"cell_type": "code", "source": source, **unused} for source in sources),
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    except OSError as error:
        raise ConfigError(
            f"--notebook {path}: it cannot be written: {error.strerror or error}; expected the "
            "path of a new file",
            code="at.notebook",
        ) from error
    text = f"{path} is written; open it with `jupyter lab {path}`"
    return Outcome(text=text, content={"notebook": path})
