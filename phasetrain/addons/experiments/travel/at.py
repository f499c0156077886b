"""Stand before a past update of a run, at a Python prompt or in a script (`phasetrain at`)."""

import code
import importlib
import linecache
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.travel.past_run import PastRun, open_past_run
from phasetrain.addons.experiments.travel.visit import Visit, limit_verdict
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import format_count

log = logging.getLogger(__name__)

GIGABYTE = 2**30

SUMMARY = "summary"
"""Name of the variable that a script may set; `--json` prints it."""

HELP = """\
task, model, optimizer, batches, config: the run before this update
step()   train the update: loss, gradient norm, the tensors that it changes
back(n)  stand n updates earlier      goto(n)  stand before update n
diff(n)  how tensors differ from those before update n
goto and back give the state of the run: what you change is dropped, and nothing is written."""


@dataclass(frozen=True)
class Stand:
    """The result of a visit.

    Attributes:
        text: for people.
        content: for programs.
        exit_code: 0, or 1 if an update that was trained again differs from the ledger.
    """

    text: str
    content: Mapping[str, Any]
    exit_code: int


def stand_at(
    folder: str,
    update: int,
    *,
    script: str | None = None,
    asks: bool = True,
    memory_gb: float = 1.0,
    trust: bool = False,
) -> Stand:
    """Stand before a past update, and run a script or open a prompt there.

    Args:
        folder: the run folder; it is only read.
        update: the update, from 1.
        script: file of Python code to run in place of a prompt.
        asks: whether to open a prompt without a script.
        memory_gb: memory for states that make stepping back instant, in GiB.
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
    with (
        open_past_run(folder, trust=trust) as past,
        Visit(
            past,
            update,
            memory=int(memory_gb * GIGABYTE),
            moved=lambda visit: names.update(list_names(visit)),
        ) as visit,
    ):
        content = describe_visit(past, visit)
        text = _format_visit(content)
        is_different = visit.first_difference is not None
        if source is not None:
            assert script is not None
            for line in text.splitlines():
                log.info(line)
            text = ""
            _run_script(script, source, names)
            content[SUMMARY] = names.get(SUMMARY)
        elif asks:
            with suppress(ImportError):  # it edits lines, and is not on every system
                importlib.import_module("readline")
            with suppress(SystemExit):  # exit() and quit()
                code.interact(f"{text}\n{HELP}", local=names, exitmsg="")
            text = ""
    return Stand(text, content, int(is_different))


def list_names(visit: Visit) -> dict[str, Any]:
    """Return the names of a prompt: the objects of the run at this place, and the moves."""
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


def describe_visit(past: PastRun, visit: Visit) -> dict[str, Any]:
    """Return where a visit stands and how it came there, for programs."""
    difference = visit.first_difference
    phase = visit.phase
    record = None
    if past.ledger is not None and visit.update in past.ledger:
        found = past.ledger[visit.update]
        record = {"loss": found.loss, "lr": found.lr, "samples": found.samples}
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
    where = f"before update {content['update']} of {content['run']}"
    if content["epoch"] is None:
        where += ", where the run ends"
    else:
        where += f": epoch {content['epoch']}, {format_count(len(content['samples']), 'sample')}"
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
    return f"{where}\n{verdict}"


def _run_script(path: str, source: str, names: dict[str, Any]) -> None:
    """Run a script with the names of a prompt; a debugger finds its lines, and its folder is
    searched for modules, as when Python runs it."""
    lines = source.splitlines(keepends=True)
    linecache.cache[path] = (len(source), None, lines, path)
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        exec(compile(source, path, "exec"), names)
    finally:
        sys.path.remove(folder)
