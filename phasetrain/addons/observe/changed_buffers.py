"""A check for buffers that forward passes of training change, although the weights around them are
frozen, or with a result that depends on how a batch is divided."""

import logging
import sys
from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.engine.plan import Phase
from phasetrain.proof.digest import hash_tensors
from phasetrain.proof.held import is_custom
from phasetrain.runtime.format import join_first
from phasetrain.tasks import Task
from phasetrain.tasks.dry_run import preserve_state

log = logging.getLogger(__name__)

MAX_NAMES = 4
"""Names in a warning."""

Location = tuple[dict[str, Tensor | None], str]
"""The buffers of a module, and the name of one: a forward pass may replace the tensor."""

Digests = Mapping[str, str]
"""Digests of buffers by the texts that name them."""


def check_changed_buffers(run_spec: RunSpec, task: Task) -> None:
    """Warn of batch norms that keep updating their statistics although the user's code has frozen
    them, and of other buffers that micro-batches or ranks change, each by its part of a batch.

    If there are such modules, the forward pass of the first micro-batch shows what changes. Nothing
    is computed if weights are sharded. Every rank has to call this. The task keeps its state; the
    global generators move.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.
    """
    phase = run_spec.plan.first_training
    if task.shards_weights or phase is None:
        return
    norms = {
        name: (module._buffers, "running_mean")
        for name, module in _list_frozen_norms(task, phase)
        if module.running_mean is not None
    }
    config = run_spec.setup.config
    world = run_spec.setup.world
    accumulate = config.OPTIMIZER.accumulate or 1
    # With `ordered`, all parts start from the same buffers, and the run takes their mean.
    is_divided = config.DISTRIBUTED.reduction != "ordered" and (
        accumulate > 1 or not world.is_single_process
    )
    others = dict(_list_custom_buffers(task)) if is_divided else {}
    if not norms and not others:
        return
    watched = norms | others
    after: Digests = {}
    changed: list[str] = []
    try:
        before = _digest(watched)
        after = _compute_buffers(run_spec, task, phase, watched)
        changed = [name for name in watched if after.get(name) != before.get(name)]
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("buffers are not compared: %s: %s", type(error).__name__, error)
    gathered = world.all_gather({name: after.get(name) for name in changed})
    if frozen := [name for name in changed if name in norms]:
        _warn_of_frozen(task.parts.model, frozen)
    moving = [name for name in changed if name in others]
    differing = [name for name in moving if len({part.get(name) for part in gathered}) > 1]
    if moving and accumulate > 1:
        log.warning(
            "%s: each forward pass of training makes a change, so OPTIMIZER.accumulate = %d makes "
            "%d changes per update, each by a micro-batch; accumulate=1 makes one, by the whole "
            "batch",
            _format_buffers(moving),
            accumulate,
            accumulate,
        )
    if differing:
        log.warning(
            "%s: forward computes new values from a batch, and each of the %d ranks has a part of "
            "the batch; the values of rank 0 are broadcast, so the other parts do not count. In "
            "forward, add up over ranks what it takes from the batch "
            "(torch.distributed.all_reduce), or train with one process",
            _format_buffers(differing),
            world.size,
        )


def _list_frozen_norms(task: Task, phase: Phase) -> Iterator[tuple[str, _NormBase]]:
    """Yield each norm layer with running statistics and frozen weights, except those that the
    config freezes, and those in a copy of trained modules, such as a momentum encoder."""
    model = task.parts.model
    schedule = task.parts.freeze_schedule
    # After MODEL.freeze_updates, whose weights are trained later.
    known = schedule.frozen_at(sys.maxsize, phase.stage).modules if schedule else frozenset()
    for name, module in model.named_modules():
        if (
            isinstance(module, _NormBase)
            and name not in known
            and not _is_trained(module)
            and any(True for _ in module.parameters())
            and not _is_copy(model, model.get_submodule(_find_frozen_root(model, name)))
        ):
            yield name, module


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_copy(model: nn.Module, frozen: nn.Module) -> bool:
    """Return whether trained modules have the parameters of a frozen one."""
    shapes = [parameter.shape for parameter in frozen.parameters()]
    if any(
        [parameter.shape for parameter in module.parameters()] == shapes and _is_trained(module)
        for module in model.modules()
    ):
        return True
    children = [child for child in frozen.children() if any(True for _ in child.parameters())]
    return bool(children) and all(_is_copy(model, child) for child in children)


def _find_frozen_root(model: nn.Module, name: str) -> str:
    """Return the name of the outermost module around one without trained weights."""
    while "." in name and not _is_trained(model.get_submodule(name.rpartition(".")[0])):
        name = name.rpartition(".")[0]
    return name


def _warn_of_frozen(model: nn.Module, names: list[str]) -> None:
    roots = dict.fromkeys(_find_frozen_root(model, name) for name in names)
    log.warning(
        "MODEL: %d batch norms without trained weights update their running statistics in training "
        "(%s), since phasetrain puts the model into training mode; MODEL.freeze=[%s] keeps them",
        len(names),
        join_first(names, MAX_NAMES),
        ", ".join(filter(None, roots)) or "'*'",
    )


def _list_custom_buffers(task: Task) -> Iterator[tuple[str, Location]]:
    """Yield the floating-point buffers of custom modules that are no norm layers, by the text that
    names them."""
    parts = task.parts
    sections = [("MODEL", parts.model), *(("LOSS", loss) for loss in parts.losses or [parts.loss])]
    for section, root in sections:
        for module_name, module in root.named_modules():
            if isinstance(module, _NormBase) or not is_custom(type(module)):
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() or buffer.is_complex():
                    path = f"{module_name}.{name}".lstrip(".")
                    yield f"`{path}` of {section}", (module._buffers, name)


def _compute_buffers(
    run_spec: RunSpec, task: Task, phase: Phase, watched: Mapping[str, Location]
) -> Digests:
    """Return the digests of buffers after the forward pass of the first micro-batch of a phase."""
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    batch.weight = task.weight_of(batch)
    task.begin(phase, fresh=False)
    task.model = task.parts.model  # a wrapper would exchange gradients and buffers
    with run_spec.machine.apply_settings(), preserve_state(task):
        task.run_forward(batch, run_spec.plan.position_of(phase, 0))
        return _digest(watched)


def _digest(watched: Mapping[str, Location]) -> Digests:
    return {
        label: hash_tensors(buffer)
        for label, (buffers, name) in watched.items()
        if (buffer := buffers[name]) is not None
    }


def _format_buffers(names: list[str]) -> str:
    return f"the buffer {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
