"""Restores the state just before a past update, for a prompt or a script (`phasetrain at`)."""

import code
import importlib
import linecache
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.script_folder import search_script_folder
from phasetrain.addons.experiments.travel.visit import Visit, limit_verdict
from phasetrain.cli.output import Outcome
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import format_count

log = logging.getLogger(__name__)

GIGABYTE = 2**30

SUMMARY = "summary"
"""Variable of a script whose value `--json` prints."""

HELP = """\
task, model, optimizer, batches, config: the run just before this update
step()   train the update: loss, gradient norm, the tensors that it changes
back(n)  go back n updates      goto(n)  restore the state just before update n
diff(n)  how tensors differ from the state just before update n
goto and back restore the state of the run: your changes are lost, and nothing is written."""


def visit_update(
    folder: str,
    update: int,
    *,
    script: str | None = None,
    prompt: bool = True,
    memory_gb: float = 1.0,
    trust: bool = False,
) -> Outcome:
    """Restore the state just before a past update, and run a script or open a prompt with it.

    The exit code is 1 if an update that was trained again differs from the ledger.

    Args:
        folder: the run folder; it is only read.
        update: the update, from 1.
        script: file of Python code to run instead of a prompt.
        prompt: whether to open a prompt if there is no script.
        memory_gb: memory for states to which `back` and `goto` return without training, in GiB.
        trust: run the code that the config of the run names.

    Raises:
        ConfigError: there is no such run, update (code `at.no_such_update`) or script
            (`at.no_script`).
        ChangedError: config or data differ from the run.
    """
    source = None
    if script is not None:
        try:
            source = Path(script).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--script {script}: it cannot be read: {error}; expected a file of Python code",
                code="at.no_script",
            ) from error
    names: dict[str, Any] = {"__name__": "__main__", "__file__": script}
    with open_visit(names, folder, update, memory_gb=memory_gb, trust=trust) as visit:
        content = describe_visit(visit)
        text = _format_visit(content)
        is_different = visit.first_difference is not None
        if source is not None:
            assert script is not None
            for line in text.splitlines():
                log.info(line)
            text = ""
            _run_script(script, source, names)
            content[SUMMARY] = names.get(SUMMARY)
        elif prompt:
            with suppress(ImportError):  # for line editing; not available on every system
                importlib.import_module("readline")
            with suppress(SystemExit):  # exit() and quit()
                code.interact(f"{text}\n{HELP}", local=names, exitmsg="")
            text = ""
    return Outcome(int(is_different), text, content)


@contextmanager
def open_visit(
    names: dict[str, Any], folder: str, update: int, *, memory_gb: float = 1.0, trust: bool = False
) -> Iterator[Visit]:
    """Open a run just before an update, and put the variables of a prompt into `names` after each
    move; see `visit_update`."""
    with (
        open_past_run(folder, trust=trust) as past,
        Visit(
            past,
            update,
            memory=int(memory_gb * GIGABYTE),
            moved=lambda visit: names.update(list_names(visit)),
        ) as visit,
    ):
        yield visit


def list_names(visit: Visit) -> dict[str, Any]:
    """Return the variables of a prompt: the objects of the run, and the functions that move."""
    task = visit.task
    return {
        "visit": visit,
        "task": task,
        "model": task.model,
        "optimizer": task.updater.optimizer,
        "batches": visit.batches,
        "config": task.config,
        "update": visit.update,
        "step": visit.step,
        "back": visit.back,
        "goto": visit.goto,
        "diff": visit.diff,
    }


def describe_visit(visit: Visit) -> dict[str, Any]:
    """Return the position of a visit and how it was reached, for programs."""
    past = visit.past
    difference = visit.first_difference
    phase = visit.phase
    record = None
    if past.ledger is not None and visit.update in past.ledger:
        entry = past.ledger[visit.update]
        record = {"loss": entry.loss, "lr": entry.lr, "samples": entry.samples}
    return {
        "run": past.folder.path,
        "update": visit.update,
        "epoch": None if phase is None else phase.epoch,
        "phase": visit.engine.state.phase,
        "step": visit.engine.state.step,
        "samples": [index for batch in visit.batches for index in batch.ids.tolist()],
        "recorded": record,
        "began": visit.began,
        "replayed": visit.replayed,
        "checked": visit.checked,
        "compared": list(past.components),
        "difference": None
        if difference is None
        else {"update": difference[0], "components": list(difference[1])},
    }


def _format_visit(content: Mapping[str, Any]) -> str:
    position = f"before update {content['update']} of {content['run']}"
    if content["epoch"] is None:
        position += ", at the end of the run"
    else:
        samples = format_count(len(content["samples"]), "sample")
        position += f": epoch {content['epoch']}, {samples}"
    trained = format_count(content["replayed"], "update")
    verdict = f"{trained} trained again"
    if content["replayed"]:
        verdict += ", none of them in the ledger"
    if content["difference"] is not None:
        first = content["difference"]
        verdict = (
            f"{trained} trained again; update {first['update']} is the first that DIFFERS from the "
            f"ledger: {', '.join(first['components'])}. This is not the state of the run"
        )
    elif content["checked"]:
        limit = limit_verdict(content["compared"]) or " bit for bit"
        verdict = f"{trained} trained again, {content['checked']} equal the ledger{limit}"
    return f"{position}\n{verdict}"


def _run_script(path: str, source: str, names: dict[str, Any]) -> None:
    """Run a script with the variables of a prompt."""
    # A debugger shows the lines that run, also if the file is edited meanwhile.
    lines = source.splitlines(keepends=True)
    linecache.cache[path] = (len(source), None, lines, path)
    with search_script_folder(path):
        exec(compile(source, path, "exec"), names)
