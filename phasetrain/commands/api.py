"""The Python API: train from a config and get the result with everything that was logged."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phasetrain.checkpoint import Checkpointer
from phasetrain.commands.engines import Loop, run_engine
from phasetrain.commands.load import load
from phasetrain.commands.result import RunResult
from phasetrain.config.compose.override_text import format_overrides
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.hooks.progress.notebook import NotebookProgress, in_notebook
from phasetrain.runs.history import Best, read_history, read_monitor
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal

__all__ = ["Config", "RunResult", "load", "overrides_of", "run", "train", "with_history"]

Config = str | Sequence[str] | Mapping[str, Any]
"""Overrides: one text, a list of words, or a mapping of sections or dotted paths."""


def run(
    config: Config = (),
    *,
    config_dir: str | Path | None = None,
    hooks: Mapping[str, Hook] | None = None,
    loop: Loop = PhaseEngine.run,
    terminal: Terminal | None = None,
) -> RunResult:
    """Run the engine that RUN.engine names, as the command line does, and return the result.

    The same call resumes a run that was stopped, and returns at once if the run has finished.

    Args:
        config: overrides as on the command line, `"experiment=digits PHASES.epochs=2"` or a list of
            such words, or a mapping: `{"experiment": "digits", "PHASES": {"epochs": 2}}`, or dotted
            paths.
        config_dir: folder with your configs.
        hooks: label -> hook, in addition to the hooks in section HOOKS.
        loop: runs the engine of a training; a custom loop iterates over `engine.steps()`.
        terminal: where to print; standard output by default, with a progress bar in a notebook.

    Raises:
        PhasetrainError: see `phasetrain.errors`.

    Example:
        >>> result = phasetrain.run("PHASES.epochs=2 RUN.dir=/tmp/two")
        >>> result.last["test/accuracy"], result.best.epoch
    """
    extra = dict(hooks or {})
    if terminal is None and in_notebook():
        # first, so that a hook of the caller with this label replaces it
        extra = {"notebook": NotebookProgress(), **extra}
    result = run_engine(
        overrides_of(config),
        config_dir=None if config_dir is None else str(config_dir),
        hooks=extra,
        loop=loop,
        terminal=terminal,
    )
    return with_history(result)


def train(
    config: Config = (),
    *,
    config_dir: str | Path | None = None,
    hooks: Mapping[str, Hook] | None = None,
    loop: Loop = PhaseEngine.run,
    terminal: Terminal | None = None,
) -> RunResult:
    """Train the run that the config describes, whatever RUN.engine says; see `run`."""
    words = [*overrides_of(config), "RUN.engine=train"]
    return run(words, config_dir=config_dir, hooks=hooks, loop=loop, terminal=terminal)


def with_history(result: RunResult) -> RunResult:
    """Return the result with the metrics.jsonl of its folder and the best value in it."""
    history = read_history(result.folder)
    best = history.best(read_monitor(result.folder))
    if best is not None:
        best = replace(best, checkpoint=_checkpoint_at(result.folder, best))
    # A run that had finished before measures nothing in this attempt.
    return replace(result, last=result.last or history.last, history=history, best=best)


def overrides_of(config: Config) -> list[str]:
    """Return a text, a list of words, or a mapping as a list of overrides."""
    if isinstance(config, str):
        return shlex.split(config)
    if isinstance(config, Mapping):
        return format_overrides(config)
    return [str(word) for word in config]


def _checkpoint_at(folder: str, best: Best) -> str:
    """Return the newest checkpoint that was saved after the update of `best`, or an empty text."""
    reader = Checkpointer(f"{folder}/checkpoints", open_storage(folder))
    try:
        listed = reader.list_checkpoints()
    except (PhasetrainError, OSError):
        return ""  # the run has ended: its result is not lost over a folder that went away
    kept = [one.name for one in listed if one.manifest.state["updates"] == best.updates]
    if kept:
        return f"{reader.root}/{kept[-1]}"
    return ""
