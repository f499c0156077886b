"""The task of a run with the weights of a checkpoint, for predictions."""

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.checkpoint.weights import find_checkpoint
from phasetrain.commands.choose import restore, restore_teacher
from phasetrain.commands.setup import Setup, settle
from phasetrain.config.compose.override_text import removals, words_of
from phasetrain.config.schema import default_schema
from phasetrain.engine.plan import Plan
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.models.sources import Source
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder, Parts, SplitData, Task

OF_PARTS = ("MODEL.", "LOSS.", "TASK.")
"""Prefixes of the facts in plan.json from which parts were built."""

FOR_INFERENCE = ("experiment=null", "RUN.engine=test", "LAUNCH.cluster=null")
"""Overrides that turn the config of a training into one for predictions."""


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


def _built(setup: Setup, loaded: LoadedCheckpoint) -> tuple[Builder, Parts]:
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


def _loaded(folder: str, checkpoint: str) -> LoadedCheckpoint:
    storage = open_storage(folder)
    if not storage.list_names(folder):
        raise ConfigError(
            f"{folder!r}: there is no such folder, or nothing in it; name the folder of a run"
        )
    if checkpoint in ("latest", "best"):
        which: Literal["latest", "best"] = "best" if checkpoint == "best" else "latest"
        return find_checkpoint(Source(folder, checkpoint=which, where=""), storage)
    reader = Checkpointer(f"{folder}/checkpoints", storage)
    listed = reader.list_checkpoints()
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
