"""Begin a run with the state of another run's optimizer (OPTIMIZER.state_from)."""

import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from torch import Tensor

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.weights import find_checkpoint
from phasetrain.errors import ConfigError
from phasetrain.models.sources import WeightSource
from phasetrain.optim import Updater
from phasetrain.runtime.format import join_first
from phasetrain.tasks import Task
from phasetrain.tasks.parts import MAIN_UPDATER

log = logging.getLogger(__name__)

KEY = "OPTIMIZER.state_from"

SHOWN_NAMES = 5
"""Maximum number of names of weights in a line."""


def load_optimizer_state(task: Task, path: str, optimizer: str) -> dict[str, Any]:
    """Give the optimizers of a task the state of the weights that have the same name and shape in
    a checkpoint; every rank must call this.

    Counts of updates per weight come along, schedules and learning rates do not.

    Args:
        task: task that has made no update.
        path: checkpoint, or run folder, whose newest checkpoint is taken.
        optimizer: OPTIMIZER.name of this run.

    Returns:
        JSON data: checkpoint, its digest, and the names of weights with and without a state.

    Raises:
        ConfigError: there is no such checkpoint, it is of another optimizer, it does not tell the
            names of its weights, no weight matches, or ranks hold shards of the state.
    """
    if task.strategy.shards_optimizer:
        raise ConfigError(
            f"{KEY} = {path!r}: ranks hold shards of the optimizer's state, into which no state of "
            "another run can be loaded; use DISTRIBUTED.strategy=ddp",
            code="config.conflict",
        )
    loaded = _find_source(path)
    before = loaded.promised["config"]["OPTIMIZER"]["name"]
    if before != optimizer:
        raise ConfigError(
            f"{KEY} = {path!r}: it is the state of the optimizer {before!r}, and OPTIMIZER.name = "
            f"{optimizer!r}; use the same optimizer, or leave {KEY} out",
            code="config.conflict",
        )
    matched: list[str] = []
    rest: list[str] = []
    for label, updater in task.updaters.items():
        part = "updater" if label == MAIN_UPDATER else f"updater.{label}"
        matching = _match_state(updater, loaded, loaded.state["task"].get(part, {}), path)
        updater.load_optimizer_state(matching)
        for number, name in enumerate(updater.names):
            (matched if number in matching else rest).append(name)
    if not matched:
        raise ConfigError(
            f"{KEY} = {path!r}: none of its weights has the name and the shape of a weight of this "
            f"run, such as {join_first(rest, SHOWN_NAMES)}; leave {KEY} out",
            code="config.no_match",
        )
    without = f"; without: {join_first(rest, SHOWN_NAMES)}" if rest else ""
    total = len(matched) + len(rest)
    log.info(
        "optimizer state of %d of %d weights from %s%s", len(matched), total, loaded.path, without
    )
    digest = sha256(loaded.manifest.encode()).hexdigest()
    return {"path": loaded.path, "digest": digest, "matched": matched, "without": rest}


def _find_source(path: str) -> LoadedCheckpoint:
    source = WeightSource(path, where="")
    try:
        return find_checkpoint(source, source.check_exists())
    except ConfigError as error:
        raise ConfigError(f"{KEY} = {error}", code=error.code) from error


def _match_state(
    updater: Updater, loaded: LoadedCheckpoint, saved: Mapping[str, Any], path: str
) -> dict[int, Any]:
    """Return the state of each weight that matches, by number of the weight in the updater."""
    states = {str(number): state for number, state in saved.get("optimizer", {}).items()}
    if states and "names" not in saved:
        raise ConfigError(
            f"{KEY} = {path!r}: {loaded.path} does not tell which weights its state belongs to, "
            "because an earlier version of phasetrain has made it; resume that run once to save it "
            "again",
            code="config.no_match",
        )
    numbers = {name: str(number) for number, name in enumerate(saved.get("names", ()))}
    weights = loaded.state["task"]["model"]
    matching = {}
    for number, name in enumerate(updater.names):
        state = states.get(numbers.get(name, ""))
        then = weights.get(name)
        shape = updater.gradients.parameters[number].shape
        if state is not None and (not isinstance(then, Tensor) or then.shape == shape):
            matching[number] = state
    return matching
