"""All weights of the plain model of a run whose checkpoints do not hold them: adapters are merged,
and frozen weights that were left out come from where the run had them."""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from phasetrain.addons.deploy.merge_adapters import merge_adapters
from phasetrain.app.load import find_test_split, load_task, resolve_for_inference
from phasetrain.app.setup import Setup
from phasetrain.app.stored.stored_config import read_loaded_config
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.config.sections.model import WhichWeights
from phasetrain.config.trust import trust_only
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import make_test_phase
from phasetrain.runtime.machine import preserve_generators
from phasetrain.tasks import Builder, Parts, SplitData, Task
from phasetrain.tasks.build.data_builder import list_splits


def complete_weights(
    loaded: LoadedCheckpoint, which: WhichWeights, *, trust: bool = False
) -> Mapping[str, Any]:
    """Return the state of the plain model of a run.

    Args:
        loaded: the checkpoint.
        which: the trained weights, or an average of them that the checkpoint has.
        trust: run the modules and dotted paths that the config of the checkpoint names.

    Raises:
        ConfigError: a part or the data of the run is missing here, or its adapters cannot be
            merged.
        ChangedError: weights that the checkpoint leaves out have changed.
    """
    state: Mapping[str, Any] = loaded.state["task"][which]
    # A training may be waiting for these weights: its initial values must not depend on them, and
    # its log should not show how the model of another run was built.
    with preserve_generators(), _without_notes():
        if excluded_digests(loaded):
            state = load_task(loaded, loaded.path, trust=trust).model.state_dict()
        if loaded.promised["config"]["MODEL"].get("adapters") is not None:
            state = _merge_adapters(loaded, state, trust=trust)
    return state


@contextmanager
def _without_notes() -> Iterator[None]:
    """Log warnings only."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


def _merge_adapters(
    loaded: LoadedCheckpoint, state: Mapping[str, Any], *, trust: bool
) -> Mapping[str, Any]:
    """Return the state of the base model with the adapters merged into its weights.

    Raises:
        ConfigError: the outputs for a batch of the test split differ, or the data is missing.
    """
    setup = resolve_for_inference(read_loaded_config(loaded, loaded.path), trust=trust)
    with trust_only(setup.trusted_paths):
        builder = setup.builder()
        data = builder.data()
        parts = builder.parts(data, builder.plan(data), train=False)
        parts.model.load_state_dict(dict(state))
        model = parts.model.eval()
        name = choose_example_split(setup, data)
        batch = read_batch(builder, data, parts, name, data[name].at(0).reader)
        args: tuple[Any, ...] = (batch.input,)
        keywords: Mapping[str, Any] = {}
        if takes_several_inputs(model):
            args, keywords = _record_call(builder.task(parts), batch)
        merge_adapters(model, *args, **keywords)
    return model.state_dict()


def takes_several_inputs(model: nn.Module) -> bool:
    """Return whether a model cannot be called with the input of a batch alone, as one that reads
    the targets before the next one."""
    needed = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return len(needed) > 1


@torch.no_grad()
def _record_call(task: Task, batch: Batch) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments with which a task calls its model for a batch."""
    calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
    hook = task.model.register_forward_pre_hook(
        lambda _, args, keywords: calls.append((args, keywords)), with_kwargs=True, prepend=True
    )
    try:
        task.forward(batch)
    finally:
        hook.remove()
    return calls[0]


def choose_example_split(setup: Setup, data: Mapping[str, SplitData]) -> str:
    """Return the name of the split whose inputs are the example."""
    # Inputs of a test: training may crop images to another size.
    split = find_test_split(setup.config.DATA)
    return next(iter(data)) if split is None else split.lower()


def read_batch(
    builder: Builder, data: Mapping[str, SplitData], parts: Parts, name: str, reader: Any
) -> Batch:
    """Return the first batch of a split."""
    phase = make_test_phase(list_splits(data)[name])
    draw = parts.loaders[name].find_first_draw(phase)
    batch: Batch = reader[draw]
    return batch
