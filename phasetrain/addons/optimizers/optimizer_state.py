"""Begin a run with the state of another optimizer (OPTIMIZER.state_from): of a run, or of a file
that torch.save has written."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from torch import Tensor

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.weights import find_checkpoint
from phasetrain.errors import ConfigError
from phasetrain.models.sources import WeightSource
from phasetrain.models.sources.files import read_file
from phasetrain.runtime.format import join_first
from phasetrain.runtime.nested import list_tensors
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import Task
from phasetrain.tasks.parts import MAIN_UPDATER

log = logging.getLogger(__name__)

KEY = "OPTIMIZER.state_from"

SHOWN_NAMES = 5
"""Maximum number of names of weights in a line."""

FILE_KEYS = ("optimizer_state_dict", "optimizer", "optimizer_states")
"""Where programs put the state of an optimizer in a file; Lightning has a list of states."""

NO_OPTIONS = {"params", "param_names", "initial_lr"}
"""Entries of a parameter group that are not options of the optimizer."""


@dataclass(frozen=True)
class SavedStates:
    """States of an optimizer by weight.

    Attributes:
        path: checkpoint or file.
        digest: its SHA-256.
        by_updater: name of the updater -> name of the weight -> its state and its shape; None if
            the shape is unknown.
    """

    path: str
    digest: str
    by_updater: Mapping[str, Mapping[str, tuple[Any, Sequence[int] | None]]]


def load_optimizer_state(task: Task, path: str, optimizer: str) -> dict[str, Any]:
    """Give the optimizers of a task the state of the weights that have the same name and shape in
    a checkpoint or a torch file; every rank must call this.

    Counts of updates per weight come along, schedules and learning rates do not.

    Args:
        task: task that has made no update.
        path: checkpoint, or run folder, whose newest checkpoint is taken, or file of torch.save
            with the `state_dict()` of an optimizer, alone or under one of `FILE_KEYS`.
        optimizer: OPTIMIZER.name of this run.

    Returns:
        JSON data: checkpoint or file, its digest, and the names of weights with and without a
        state.

    Raises:
        ConfigError: there is no such checkpoint or file, it is of another optimizer, it does not
            tell the names of its weights, no weight matches, or ranks hold shards of the state.
    """
    if task.strategy.shards_optimizer:
        raise ConfigError(
            f"{KEY} = {path!r}: ranks hold shards of the optimizer's state, into which no state of "
            "another run can be loaded; use DISTRIBUTED.strategy=ddp",
            code="config.conflict",
        )
    saved = _read_states(task, path, optimizer)
    matched: list[str] = []
    rest: list[str] = []
    for label, updater in task.updaters.items():
        named = saved.by_updater.get(label, {})
        matching = {}
        for number, name in enumerate(updater.names):
            state, shape = named.get(name, (None, None))
            own_shape = updater.gradients.parameters[number].shape
            if state is not None and (shape is None or own_shape == tuple(shape)):
                matching[number] = state
                matched.append(name)
            else:
                rest.append(name)
        updater.load_optimizer_state(matching)
    states = [state for named in saved.by_updater.values() for state, _ in named.values()]
    if not any(states):
        raise ConfigError(
            f"{KEY} = {path!r}: its optimizer keeps no state, like SGD without momentum; leave "
            f"{KEY} out",
            code="config.no_state",
        )
    if not matched:
        raise ConfigError(
            f"{KEY} = {path!r}: none of its weights has the name and the shape of a weight of this "
            f"run, such as {join_first(rest, SHOWN_NAMES)}; leave {KEY} out",
            code="config.no_match",
        )
    without = f"; without: {join_first(rest, SHOWN_NAMES)}" if rest else ""
    total = len(matched) + len(rest)
    log.info(
        "optimizer state of %d of %d weights from %s%s", len(matched), total, saved.path, without
    )
    return {"path": saved.path, "digest": saved.digest, "matched": matched, "without": rest}


def _read_states(task: Task, path: str, optimizer: str) -> SavedStates:
    source = WeightSource(path, where="")
    try:
        storage = source.check_exists()
        if not storage.list_names(path):
            return _read_file_states(task, source, storage)
        loaded = find_checkpoint(source, storage)
    except ConfigError as error:
        if error.key:
            raise
        raise ConfigError(f"{KEY} = {error}", code=error.code) from error
    before = loaded.promised["config"]["OPTIMIZER"]["name"]
    if before != optimizer:
        raise ConfigError(
            f"{KEY} = {path!r}: it is the state of the optimizer {before!r}, and OPTIMIZER.name = "
            f"{optimizer!r}; use the same optimizer, or leave {KEY} out",
            code="config.conflict",
        )
    by_updater = {label: _name_states(loaded, label, path) for label in task.updaters}
    return SavedStates(loaded.path, sha256(loaded.manifest.encode()).hexdigest(), by_updater)


def _name_states(
    loaded: LoadedCheckpoint, label: str, path: str
) -> dict[str, tuple[Any, Sequence[int] | None]]:
    """Return the state and the shape of each weight that an updater of a checkpoint has."""
    part = "updater" if label == MAIN_UPDATER else f"updater.{label}"
    saved = loaded.state["task"].get(part, {})
    states = {str(number): state for number, state in saved.get("optimizer", {}).items()}
    if states and "names" not in saved:
        raise ConfigError(
            f"{KEY} = {path!r}: {loaded.path} does not tell which weights its state belongs to, "
            "because an earlier version of phasetrain has made it; resume that run once to save it "
            "again",
            code="config.no_match",
        )
    weights = loaded.state["task"]["model"]
    named: dict[str, tuple[Any, Sequence[int] | None]] = {}
    for number, name in enumerate(saved.get("names", ())):
        weight = weights.get(name)
        shape = weight.shape if isinstance(weight, Tensor) else None
        named[name] = states.get(str(number)), shape
    return named


def _read_file_states(task: Task, source: WeightSource, storage: Storage) -> SavedStates:
    """Return the states in a file of torch.save.

    The states belong to the weights in `param_names` of its groups, as an optimizer of
    `named_parameters()` saves them. Without names, they belong to the parameters of the model in
    their order; number and shapes of all states have to fit.
    """
    file = read_file(source, storage, source.path)
    content: Any = file.loaded
    for key in FILE_KEYS:
        content = content.get(key, content)
    if isinstance(content, list) and content:
        content = content[0]
    if not isinstance(content, Mapping) or not {"state", "param_groups"} <= content.keys():
        raise source.make_error(
            "it is not the folder of a run or of a checkpoint, and the file has no state of an "
            f"optimizer; expected the result of its state_dict() alone, or as {FILE_KEYS[0]!r}"
        )
    groups = content["param_groups"]
    _check_options(task, source, groups)
    numbers = [number for group in groups for number in group["params"]]
    names = [name for group in groups for name in group.get("param_names", ())]
    states = [content["state"].get(number) for number in numbers]
    shapes = [_find_shape(state) for state in states]
    if len(names) != len(numbers):
        names = _guess_names(task, source, shapes, len(groups))
    named = {name: (state, shape) for name, state, shape in zip(names, states, shapes, strict=True)}
    return SavedStates(source.path, file.digest, dict.fromkeys(task.updaters, named))


def _check_options(task: Task, source: WeightSource, groups: Sequence[Mapping[str, Any]]) -> None:
    """Reject the state of another optimizer, which has options that this one lacks."""
    own = task.updater.optimizer.param_groups[0].keys() | NO_OPTIONS
    unknown = sorted({option for group in groups for option in group} - own)
    if unknown:
        raise source.make_error(
            f"it is the state of another optimizer, with the options {', '.join(unknown)}; use the "
            f"same optimizer, or leave {KEY} out",
            "config.conflict",
        )


def _guess_names(
    task: Task, source: WeightSource, shapes: Sequence[Sequence[int] | None], groups: int
) -> list[str]:
    """Return the names of the weights of a file that does not have them: the parameters of the
    model in their order.

    Raises:
        ConfigError: the file has another number of weights, another shape, or several groups,
            whose order says nothing.
    """
    weights = dict(task.parts.model.named_parameters())
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    for names in (list(weights), trained):
        if groups == 1 and len(names) == len(shapes):
            pairs = zip(names, shapes, strict=True)
            if all(shape is None or weights[name].shape == shape for name, shape in pairs):
                return names
    raise source.make_error(
        f"it has {len(shapes)} weights without names in {groups} groups, which are not the "
        f"{len(weights)} parameters of the model in their order; save the state of an optimizer "
        "that was made of `model.named_parameters()`",
        "config.no_match",
    )


def _find_shape(state: Any) -> Sequence[int] | None:
    """Return the shape of a weight: the shape of its state, which also has 0-d counts."""
    shapes = [tensor.shape for tensor in list_tensors(state) if tensor.ndim]
    return shapes[0] if shapes else None
