"""The task of a run with the weights of a checkpoint, for predictions."""

import io
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from phasetrain.app.select_checkpoint import build_task, find_stage
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.app.stored.stored_config import StoredConfig, read_loaded_config
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.promised import find_checkpoints
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.checkpoint.weights import find_checkpoint
from phasetrain.config.addons import find_service
from phasetrain.config.nested import leaves
from phasetrain.config.objects import (
    GivenObject,
    GivenObjects,
    current_objects,
    is_object_name,
    provide_objects,
)
from phasetrain.config.schema import is_split
from phasetrain.config.sections.model import WhichWeights
from phasetrain.config.trust import trust_only
from phasetrain.engine.plan import Plan
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.models.freeze import disable_gradients, intersect_frozen
from phasetrain.models.sources import WeightSource
from phasetrain.runs.paths import check_run_folder
from phasetrain.runs.view import RunView
from phasetrain.runtime.machine import preserve_generators
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder, SplitData, Task
from phasetrain.tasks.build.weights_builder import find_frozen

log = logging.getLogger(__name__)

OF_PARTS = ("MODEL.", "LOSS.", "TASK.")
"""Prefixes of the facts in plan.json from which parts were built."""


@preserve_generators()
def load(
    folder: str | Path,
    checkpoint: str = "latest",
    *,
    weights: WhichWeights | None = None,
    device: str = "auto",
    changes: Sequence[str] = (),
    trust: bool = False,
    model: nn.Module | None = None,
) -> Task:
    """Return the task of a run with the weights of a checkpoint, in test mode, for
    `task.predict(inputs)`.

    The config comes from the checkpoint. Neither the data of the run nor its optimizer is needed:
    the facts about the data that parts depend on, such as the number of classes, are in plan.json.
    `task.model` is the network, a plain `torch.nn.Module`, in which weights that were frozen in all
    stages have `requires_grad=False` (in an average all have). `task.transform` applies the
    transforms of the first test split, and `task.class_names` are the names of the classes.

    Args:
        folder: folder of a run, or of one checkpoint.
        checkpoint: `latest`, `best` (by CHECKPOINT.best.monitor of the run), or its name.
        weights: the trained weights (`model`), or an average of them (`ema`, `swa`,
            `schedule_free`); None: `schedule_free` if the run has MODEL.schedule_free, else
            `model`.
        device: see MACHINE.device.
        changes: overrides of the config, such as `DATA.TEST.transforms=[...]`.
        trust: run the modules of RUN.imports and the dotted paths that the config of the folder
            names, even if this user did not make the run.

    Raises:
        ConfigError: there is no such run, checkpoint or average, a part cannot be built here, or
            the folder names code that is not trusted (`trust.needed`).

    Example:
        >>> task = phasetrain.load("runs/adamw", "best")
        >>> task.predict(images, transform=True).argmax(1)
    """
    path = str(folder).rstrip("/")
    loaded = load_checkpoint(path, checkpoint)
    return load_task(
        loaded,
        path,
        choose_weights(weights, loaded),
        device=device,
        changes=changes,
        trust=trust,
        model=model,
    )


def choose_weights(weights: WhichWeights | None, loaded: LoadedCheckpoint) -> WhichWeights:
    """Return which weights of a checkpoint to use: those that are asked for, or by default the
    trained ones.

    A schedule-free optimizer trains other weights than those for use: a run with
    MODEL.schedule_free has the latter as the default.
    """
    if weights is not None:
        return weights
    if loaded.promised["config"]["MODEL"].get("schedule_free") is not None:
        return "schedule_free"
    return "model"


def _use_weights(task: Task, weights: WhichWeights, path: str) -> None:
    parts = task.parts
    if weights != "model":
        if weights not in parts.averages:
            raise ConfigError(
                f"weights = {weights!r}: {path} has no MODEL.{weights}; expected 'model'",
                code="checkpoint.no_average",
            )
        task.parts = replace(parts, model=parts.averages[weights].module)
        task.model = task.parts.model
    task.model.eval()
    task.loss.eval()


def load_task(
    loaded: LoadedCheckpoint,
    path: str,
    weights: WhichWeights = "model",
    *,
    device: str = "cpu",
    changes: Sequence[str] = (),
    trust: bool = False,
    model: nn.Module | None = None,
) -> Task:
    """Return the task of a run with the weights of a checkpoint, in test mode, see `load`.

    Args:
        loaded: the checkpoint.
        path: folder of the run or of the checkpoint, for messages.
        weights: the trained weights, or an average of them.
        device, changes, trust, model: see `load`.

    Raises:
        ConfigError: see `load`.
    """
    stored = read_loaded_config(loaded, path)
    objects = _complete_objects(stored.values, model)
    words = [*_remove_lost_meters(stored.values, objects), *changes]
    with provide_objects(objects):
        setup = resolve_for_inference(stored, words, device=device, trust=trust)
    with provide_objects(objects), trust_only(setup.trusted_paths):
        task = _build_task(setup, loaded)
        _add_transform(task, setup, loaded)
    _add_services(task, stored.values, _run_folder(loaded.path))
    # As in the run, for those who train the model further in Python.
    frozen = find_frozen(setup.builder().context, task.model)
    disable_gradients(task.model, intersect_frozen(frozen))
    _use_weights(task, weights, loaded.path)
    return task


def resolve_for_inference(
    stored: StoredConfig,
    words: Sequence[str] = (),
    *,
    device: str = "cpu",
    trust: bool,
    config_dir: str | None = None,
) -> Setup:
    """Return the config of a run for predictions.

    Args:
        stored: the config of the run.
        words: changes of it.
        device, trust: see `load`.
        config_dir: see `resolve_config`.

    Raises:
        ConfigError: see `load`.
    """
    return resolve_config(
        ["RUN.engine=test", "LAUNCH.cluster=null", f"MACHINE.device={device}", *words],
        config_dir=config_dir,
        # silent: notes about the config are for the person who trains
        terminal=Terminal(io.StringIO(), live=False),
        stored=replace(stored, is_trusted=trust),
    )


def _add_services(task: Task, config: Mapping[str, Any], folder: str) -> None:
    """Let a task read files and continue texts, if the add-ons that do it are installed."""
    if find_text_source := find_service("find_text_source"):
        task.text_source = find_text_source(config, folder)
    split = find_test_split(config["DATA"])
    make_input_reader = find_service("make_input_reader")
    if split is not None and make_input_reader is not None:
        task.reader = make_input_reader(config["DATA"][split], read_data_facts(folder, split))


class _LostLoss(nn.Module):
    """Stands for a loss that was given in Python in another process: predictions need none."""

    def forward(self, output: Any, target: Any) -> Any:
        """Reject the call."""
        raise ConfigError(
            "LOSS: the loss of this run was given as an object in Python, and is not in its folder",
            code="config.missing_object",
        )


def _complete_objects(asked: Mapping[str, Any], model: nn.Module | None) -> GivenObjects:
    """Return the objects that a stored config names: the objects of this process, the model, and
    substitutes for parts that predictions do not need."""

    def refuse(**_facts: Any) -> Any:
        raise ConfigError(
            "a dataset of this run was given as an object in Python, and is not in its folder",
            code="config.missing_object",
        )

    objects = dict(current_objects().by_name)
    for path, name in leaves(asked).items():
        if not is_object_name(name) or name in objects:
            continue
        if path == "MODEL.name" and model is not None:
            objects[name] = GivenObject(model, path, is_copied=True)
        elif path == "LOSS.name":
            objects[name] = GivenObject(_LostLoss(), path)
        elif path.startswith("DATA."):
            objects[name] = GivenObject(refuse, path, is_factory=True)
    return GivenObjects(objects)


def _remove_lost_meters(asked: Mapping[str, Any], objects: GivenObjects) -> list[str]:
    """Return the overrides that remove the meters which only another process has."""
    return [
        f"METERS.{label}=null"
        for label, section in asked["METERS"].items()
        if is_object_name(section.get("name")) and section["name"] not in objects.by_name
    ]


class _DatalessBuilder(Builder):
    """Builds parts from the facts about the data in plan.json, without the data."""

    recorded: Mapping[str, Any]

    def facts(self, data: Mapping[str, SplitData], plan: Plan) -> dict[str, Any]:
        """Return the recorded facts, and the facts of this machine."""
        return {
            **self.recorded,
            "world": self.context.world.size,
            "device": self.context.machine.device,
            "precision": self.context.machine.precision,
        }


def _build_task(setup: Setup, loaded: LoadedCheckpoint) -> Task:
    """Return the task of a run with its weights, without opening the data if possible."""
    builder_without_data = _DatalessBuilder(setup.config, setup.machine, setup.world, setup.stages)
    recorded = _read_facts(loaded.path)
    # An object needs no facts: then none are recorded, and none are missing.
    if recorded or is_object_name(setup.config.MODEL.name):
        builder_without_data.recorded = recorded
        # A fact that JSON cannot hold, or of an older release: open the data instead.
        with suppress(ConfigError, ChangedError):
            return build_task(builder_without_data, {}, Plan(), loaded)
    builder = setup.builder()
    data = builder.data()
    return build_task(builder, data, builder.plan(data), loaded)


def _read_facts(checkpoint: str) -> dict[str, Any]:
    """Return name -> fact about the data from the plan.json of a checkpoint's run."""
    folder = _run_folder(checkpoint)
    # JSON has no tuples, and parts expect shapes as tuples.
    return {
        path.rpartition(".")[2]: tuple(value) if isinstance(value, list) else value
        for path, value in RunView(folder).plan.facts.items()
        if path.startswith(OF_PARTS)
    }


def _add_transform(task: Task, setup: Setup, loaded: LoadedCheckpoint) -> None:
    """Add the transforms of the first test split to a task, and the names of the classes."""
    checkpoint = loaded.path
    split = find_test_split(setup.config.DATA)
    if split is None:
        return
    task.class_names = _read_class_names(checkpoint, split)
    build_input_transform = find_service("build_input_transform")
    if build_input_transform is None:
        return
    try:
        context = setup.builder().context
        if setup.stages:  # the model was tested with the transforms of the stage
            context = replace(context, config=setup.stages[find_stage(loaded)])
        task.transform = build_input_transform(context, split)
    except ConfigError as error:
        if error.code != "config.missing_object":
            raise
        log.warning("the transforms of DATA.%s are not available: %s", split, error)
        return
    task.transform.scales_bytes = "channels" in read_data_facts(_run_folder(checkpoint), split)
    if task.transform:
        log.info("predict(..., transform=True) applies %s", task.transform)


def read_data_facts(folder: str, split: str) -> Mapping[str, Any]:
    """Return the facts about the data of a split in the plan.json of a run, such as `channels` and
    `classes`; empty if it has none."""
    section: Any = RunView(folder).plan.content
    # Step by step: a plan.json of another version may lack any of them.
    for key in ("data", split.lower(), "facts"):
        section = section.get(key, {}) if isinstance(section, Mapping) else {}
    return dict(section)


def find_test_split(data: Mapping[str, Any]) -> str | None:
    """Return the key of the first test split in section DATA, or None."""
    return next((name for name in data if is_split(name) and name != "TRAIN"), None)


def _read_class_names(checkpoint: str, split: str) -> tuple[str, ...]:
    """Return the names of the classes in the plan.json of a checkpoint's run."""
    for name in (split, "train"):
        names = read_data_facts(_run_folder(checkpoint), name).get("class_names")
        if isinstance(names, list):
            return tuple(map(str, names))
    return ()


def _run_folder(checkpoint: str) -> str:
    return checkpoint.rpartition("/checkpoints/")[0] or "."


def load_checkpoint(folder: str, checkpoint: str) -> LoadedCheckpoint:
    """Return a checkpoint of a run: the newest, the best, or one by its name.

    Raises:
        ConfigError: there is none.
    """
    storage = open_storage(folder)
    check_run_folder(folder, storage)
    if checkpoint in ("latest", "best"):
        which: Literal["latest", "best"] = "best" if checkpoint == "best" else "latest"
        return find_checkpoint(WeightSource(folder, checkpoint=which, where=""), storage)
    reader = CheckpointReader(f"{folder}/checkpoints", storage)
    return reader.load(f"{reader.root}/{find_checkpoints(reader, checkpoint)[0].name}")
