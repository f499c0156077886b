"""The Python API: train from a config and get the result with everything that was logged."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phasetrain.app.build_hooks import GivenHooks, label_hooks
from phasetrain.app.engines import OnException, run_engine
from phasetrain.app.load import load
from phasetrain.app.python_objects.name_objects import ObjectNamer
from phasetrain.app.result import RunResult
from phasetrain.app.train.training import Loop
from phasetrain.checkpoint import Checkpointer
from phasetrain.config.addons import find_service
from phasetrain.config.compose.override_text import format_overrides
from phasetrain.config.objects import provide_objects
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import PhasetrainError
from phasetrain.runs.history import History, read_history
from phasetrain.runs.view import RunView
from phasetrain.runtime.machine import preserve_generators
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal, in_notebook

__all__ = ["Config", "RunResult", "load", "overrides_of", "run", "train", "with_history"]

Config = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""Overrides: one text, a mapping of sections or dotted paths, or a list of words and mappings, of
which later ones win."""


def run(
    config: Config = (),
    *,
    config_dir: str | Path | None = None,
    hooks: GivenHooks | None = None,
    loop: Loop = PhaseEngine.run,
    terminal: Terminal | None = None,
    on_exception: OnException = "raise",
) -> RunResult:
    """Run the engine that RUN.engine names, as the command line does, and return the result.

    The same call resumes a run that was stopped, and returns at once if the run has finished.

    Args:
        config: overrides as on the command line, `"experiment=digits PHASES.epochs=2"` or a list of
            such words, or a mapping: `{"experiment": "digits", "PHASES": {"epochs": 2}}`, or dotted
            paths. In a mapping a part may also be a class, a function or an object instead of a
            name: `{"MODEL": {"name": Net, "width": 32}, "DATA": {"TRAIN": dataset}}`.
        config_dir: folder with your configs.
        hooks: hooks in addition to section HOOKS: a list, whose labels are the class names in
            snake case, or a mapping from labels; None entries are skipped.
        loop: runs the engine of a training; a custom loop iterates over `engine.steps()`.
        terminal: where to print; standard output by default, with a progress bar in a notebook.
        on_exception: `ignore` does not raise an exception of the run, but returns a result with
            state `failed` and the exception as `error`; mistakes in the config are raised anyway.

    Raises:
        PhasetrainError: see `phasetrain.errors`.

    Example:
        >>> result = phasetrain.run("PHASES.epochs=2 RUN.dir=/tmp/two")
        >>> result.last["test/accuracy"], result.best.epoch
    """
    return _run_words(config, (), config_dir, hooks, loop, terminal, on_exception)


def train(
    config: Config = (),
    *,
    config_dir: str | Path | None = None,
    hooks: GivenHooks | None = None,
    loop: Loop = PhaseEngine.run,
    terminal: Terminal | None = None,
    on_exception: OnException = "raise",
) -> RunResult:
    """Train the run that the config describes, whatever RUN.engine says; see `run`."""
    return _run_words(
        config, ("RUN.engine=train",), config_dir, hooks, loop, terminal, on_exception
    )


def _run_words(
    config: Config,
    words: Sequence[str],
    config_dir: str | Path | None,
    hooks: GivenHooks | None,
    loop: Loop,
    terminal: Terminal | None,
    on_exception: OnException,
) -> RunResult:
    """Run a config with further overrides, see `run`."""
    extra = label_hooks(hooks)
    if terminal is None and in_notebook() and (make_hook := find_service("show_in_notebook")):
        # first, so that a hook of the caller with this label replaces it
        extra = {"notebook": make_hook(), **extra}
    namer = ObjectNamer()
    overrides = [*overrides_of(config, namer), *words]
    objects = namer.finish()
    # The run seeds the global generators, and the caller may draw from them.
    with provide_objects(objects), preserve_generators():
        result = run_engine(
            overrides,
            config_dir=None if config_dir is None else str(config_dir),
            hooks=extra,
            loop=loop,
            terminal=terminal,
            on_exception=on_exception,
            from_python=True,
        )
        return with_history(replace(result, objects=objects))


def with_history(result: RunResult) -> RunResult:
    """Return the result with the metrics.jsonl of its folder and the best value in it."""
    run = RunView(result.folder)
    history = read_history(run)
    best = history.best_monitored(run.monitor) if run.monitor else history.best()
    updates_of = _list_checkpoints(result.folder)
    if best is not None:
        kept = [path for path, updates in updates_of.items() if updates == best.updates]
        best = replace(best, checkpoint=next(reversed(kept), ""))
    last = result.last
    if result.state == "finished" or not last:
        measured = history
        if result.loaded_checkpoint:  # all other metrics are of other weights
            updates = updates_of.get(result.loaded_checkpoint)
            measured = History([row for row in history if row.get("updates") == updates])
        last = {**measured.last, **last}  # earlier attempts may have measured some of it
    return replace(result, last=last, history=history, best=best)


def overrides_of(config: Config, namer: ObjectNamer | None = None) -> list[str]:
    """Return a text, a mapping, or a list of words and mappings as a list of overrides.

    Args:
        config: see `Config`.
        namer: names the classes and objects in mappings.
    """
    namer = namer or ObjectNamer()
    if isinstance(config, str):
        return shlex.split(config)
    if isinstance(config, Mapping):
        return format_overrides(namer.name_all(config))
    words = list[str]()
    for item in config:
        words += overrides_of(item, namer) if isinstance(item, Mapping) else [str(item)]
    return words


def _list_checkpoints(folder: str) -> dict[str, int]:
    """Return path -> updates of the checkpoints of a run, oldest first."""
    reader = Checkpointer(f"{folder}/checkpoints", open_storage(folder))
    try:
        listed = reader.list_checkpoints()
    except (PhasetrainError, OSError):
        return {}  # the run has ended: its result is not lost over a folder that went away
    return {f"{reader.root}/{saved.name}": saved.manifest.state["updates"] for saved in listed}
