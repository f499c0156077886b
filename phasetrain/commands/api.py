"""From Python: a run with its result and history, and the task of a run with its weights."""

import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from phasetrain.checkpoint import Checkpointer, Loaded
from phasetrain.checkpoint.weights import chosen
from phasetrain.commands.cli import run as run_words
from phasetrain.commands.setup import Setup, settle
from phasetrain.commands.test import restore, restore_teacher
from phasetrain.commands.train.train import Loop
from phasetrain.config.override_text import removals, words_of
from phasetrain.config.schema import default_schema
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Plan
from phasetrain.errors import ChangedError, ConfigError, PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.hooks.progress.notebook import NotebookProgress, in_notebook
from phasetrain.models.sources import Source
from phasetrain.runs.history import Best, History, monitor_of, read_history
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder, Parts, SplitData, Task

Config = str | Sequence[str] | Mapping[str, Any]
"""Overrides, as one text or a list of words, or a mapping of sections or dotted paths."""

OF_PARTS = ("MODEL.", "LOSS.", "TASK.")
"""Beginnings of the facts in plan.json that parts were made from."""


FOR_INFERENCE = ("experiment=null", "RUN.engine=test", "LAUNCH.cluster=null")
"""Overrides with which a config is taken over to ask its model only."""


@dataclass(frozen=True)
class RunResult:
    """What came of a run.

    Attributes:
        folder: the run folder.
        state: `finished`, `preempted`, `planned`, `tested`, `extracted`, `found`, or `submitted`.
        reason: why it ended.
        updates: optimizer updates done.
        last: latest value of every metric, by `split/name`.
        best: the best value by CHECKPOINT.best.monitor, or of the first metric of a test: value,
            epoch, updates, and the checkpoint that has these weights, where one is kept; None where
            nothing was measured.
        history: everything that was logged, of all attempts, as a table.
        digest: SHA-256 of the weights; empty where no model was trained.
        seconds: wall time of this attempt.
        exit_code: what the command line would have ended with.
    """

    folder: str
    state: str
    reason: str
    updates: int
    last: Mapping[str, float]
    best: Best | None
    history: History
    digest: str
    seconds: float
    exit_code: int

    def load(self, checkpoint: str = "latest", **options: Any) -> Task:
        """Return the task of the run with its weights, see `phasetrain.load`."""
        return load(self.folder, checkpoint, **options)


def run(
    config: Config = (),
    *,
    config_dir: str | Path | None = None,
    hooks: Mapping[str, Hook] | None = None,
    loop: Loop = PhaseEngine.run,
    terminal: Terminal | None = None,
) -> RunResult:
    """Do what the command line does, and return what came of it with everything that was logged.

    The same call again goes on with a run that was stopped, and returns at once where it has
    finished.

    Args:
        config: overrides as on the command line, `"experiment=digits PHASES.epochs=2"` or a list of
            such words, or a mapping: `{"experiment": "digits", "PHASES": {"epochs": 2}}`, or dotted
            paths.
        config_dir: a folder with configs of your own.
        hooks: label -> hook, in addition to those under HOOKS.
        loop: runs the engine of a training; a loop of your own goes through `engine.steps()`.
        terminal: where to print; standard output by default, with a bar that moves in a notebook.

    Raises:
        PhasetrainError: see `phasetrain.errors`.

    Example:
        >>> result = phasetrain.run("PHASES.epochs=2 RUN.dir=/tmp/two")
        >>> result.last["test/accuracy"], result.best.epoch
    """
    extra = dict(hooks or {})
    if terminal is None and in_notebook():
        extra = {"notebook": NotebookProgress(), **extra}
    found = run_words(
        overrides_of(config),
        config_dir=None if config_dir is None else str(config_dir),
        hooks=extra,
        loop=loop,
        terminal=terminal,
    )
    history = read_history(found.folder)
    best = history.best(monitor_of(found.folder))
    return RunResult(
        folder=found.folder,
        state=found.state,
        reason=found.reason,
        updates=found.updates,
        last=dict(found.metrics) if found.metrics is not None else history.last,
        best=None
        if best is None
        else replace(best, checkpoint=_checkpoint_at(found.folder, best.updates)),
        history=history,
        digest=found.digest,
        seconds=found.seconds,
        exit_code=found.exit_code,
    )


def overrides_of(config: Config) -> list[str]:
    """Return the overrides that say what a text, a list of words, or a mapping says."""
    if isinstance(config, str):
        return shlex.split(config)
    if isinstance(config, Mapping):
        return words_of(config)
    return [str(word) for word in config]


def load(
    folder: str | Path,
    checkpoint: str = "latest",
    *,
    weights: Literal["model", "ema", "swa"] = "model",
    device: str = "auto",
) -> Task:
    """Return the task of a run with the weights of a checkpoint, in test mode, for
    `task.predict(inputs)`.

    The config is that of the checkpoint. Neither the data of the run nor its optimizer is needed:
    what parts were told of the data stands in plan.json. `task.model` is the network, a plain
    `torch.nn.Module`.

    Args:
        folder: of a run, or of one checkpoint.
        checkpoint: `latest`, `best` (by CHECKPOINT.best.monitor of the run), or the name of one.
        weights: those that were trained, or an average of them (MODEL.ema, MODEL.swa).
        device: as MACHINE.device.

    Raises:
        ConfigError: there is no such run, checkpoint or average, or a part of it cannot be made
            here.

    Example:
        >>> task = phasetrain.load("runs/adamw", "best")
        >>> task.predict(images).argmax(1)
    """
    loaded = _loaded(str(folder).rstrip("/"), checkpoint)
    asked = loaded.promised["config"]
    words = [
        *words_of(asked),
        *removals(asked, default_schema()),
        *FOR_INFERENCE,
        f"MACHINE.device={device}",
    ]
    setup = settle(words, terminal=Terminal(io.StringIO(), live=False))
    builder, parts = _built(setup, loaded)
    task = builder.task(parts)
    restore_teacher(task, loaded)
    if weights != "model":
        if weights not in parts.averages:
            raise ConfigError(
                f"weights = {weights!r}: {loaded.path} was made without MODEL.{weights}; take 'model'"
            )
        task.parts = replace(parts, model=parts.averages[weights].module)
        task.model = task.parts.model
    task.model.eval()
    task.loss.eval()
    return task


class _Recorded(Builder):
    """Makes parts from what a run has written down of its data, without the data."""

    recorded: Mapping[str, Any]

    def facts(self, data: Mapping[str, SplitData], plan: Plan) -> dict[str, Any]:
        """Return the facts on record, and those of this machine."""
        return {
            **self.recorded,
            "world": self.world.size,
            "device": self.machine.device,
            "precision": self.machine.precision,
        }


def _built(setup: Setup, loaded: Loaded) -> tuple[Builder, Parts]:
    """Return the parts of a run with their weights: from the facts on record, or from the data
    where they lack."""
    recorded = _Recorded(setup.config, setup.machine, setup.world, setup.stages)
    recorded.recorded = _facts(loaded.path)
    if recorded.recorded:
        try:
            parts = recorded.parts({}, Plan(()), train=False)
            restore(parts, loaded)
        except (ConfigError, ChangedError):  # a fact that JSON cannot hold
            pass
        else:
            return recorded, parts
    builder = setup.builder()
    data = builder.data()
    parts = builder.parts(data, builder.plan(data), train=False)
    restore(parts, loaded)
    return builder, parts


def _facts(checkpoint: str) -> dict[str, Any]:
    """Return what plan.json says that parts were told, by the name of the fact."""
    folder = checkpoint.rpartition("/checkpoints/")[0] or "."
    storage = open_storage(folder)
    found = storage.read_json(f"{folder}/plan.json")
    facts = found.get("facts") if isinstance(found, dict) else None
    if not isinstance(facts, dict):
        return {}
    return {
        path.rpartition(".")[2]: tuple(value) if isinstance(value, list) else value
        for path, value in facts.items()
        if path.startswith(OF_PARTS)
    }


def _loaded(folder: str, checkpoint: str) -> Loaded:
    storage = open_storage(folder)
    if not storage.names(folder):
        raise ConfigError(
            f"{folder!r}: there is no such folder, or nothing in it; name the folder of a run"
        )
    if checkpoint in ("latest", "best"):
        which: Literal["latest", "best"] = "best" if checkpoint == "best" else "latest"
        return chosen(Source(folder, checkpoint=which, where=""), storage)
    reader = Checkpointer(f"{folder}/checkpoints", storage)
    listed = reader.listed()
    name = next(
        (one.name for one in reversed(listed) if checkpoint in (one.name, one.manifest.facts.name)),
        None,
    )
    if name is None:
        raise ConfigError(
            f"checkpoint = {checkpoint!r}: {folder!r} has no such checkpoint; it has "
            f"{', '.join(one.name for one in listed) or 'none'}, and `latest` and `best` choose among them"
        )
    return reader.load(f"{reader.root}/{name}")


def _checkpoint_at(folder: str, updates: int) -> str:
    """Return the newest checkpoint after so many updates; empty where none is kept."""
    reader = Checkpointer(f"{folder}/checkpoints", open_storage(folder))
    try:
        listed = reader.listed()
    except (PhasetrainError, OSError):
        return ""
    kept = [one.name for one in listed if one.manifest.state["updates"] == updates]
    if kept:
        return f"{reader.root}/{kept[-1]}"
    return ""
