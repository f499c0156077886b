"""A check for forward passes that call `backward()` themselves."""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.proof.held import is_custom
from phasetrain.tasks import Task
from phasetrain.tasks.dry_run import preserve_state

log = logging.getLogger(__name__)


def check_own_backward(run_spec: RunSpec, task: Task) -> None:
    """Reject a forward pass, of training or of a test, that leaves gradients on trained weights, as
    an attack on the inputs by `loss.backward()` does.

    One micro-batch of each split is computed. Nothing is checked if weights are sharded, or if the
    task has its own steps, which may call `backward()`. Every rank has to call this. The task keeps
    its state; the global generators move.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.

    Raises:
        ConfigError: there is such a pass.
    """
    kind = type(task)
    steps = {True: kind.train_step is Task.train_step, False: kind.test_step is Task.test_step}
    weights = [
        weight for updater in task.updaters.values() for weight in updater.gradients.parameters
    ]
    if task.shards_weights or not weights:
        return
    firsts: dict[str, Phase] = {}
    for phase, _ in run_spec.plan.phases.kinds:
        if phase.steps and not phase.weights and steps[phase.is_train]:
            firsts.setdefault(phase.split, phase)
    found: list[str] = []
    for split, phase in firsts.items():
        try:
            if _leaves_gradients(run_spec, task, phase, weights):
                found.append(split)
        except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
            log.debug("%s is not computed: %s: %s", split, type(error).__name__, error)
    found = [split for part in task.parts.world.all_gather(found) for split in part]
    if not found:
        return
    section, name = "TASK", kind.__name__
    if not is_custom(kind):
        section, name = "MODEL", type(task.parts.model).__name__
    raise ConfigError(
        f"{section}: forward of {name} calls backward() in {found[0]}, which adds to the "
        "gradients of the weights, and so to the update; use torch.autograd.grad(loss, inputs) for "
        "the gradient of inputs",
        code="task.own_backward",
    )


def _leaves_gradients(run_spec: RunSpec, task: Task, phase: Phase, weights: list[Tensor]) -> bool:
    """Return whether a forward pass of the first micro-batch of a phase leaves gradients."""
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    batch.weight = task.weight_of(batch)
    task.begin(phase, fresh=False)
    if phase.is_train:
        task.model = task.parts.model  # a wrapper would exchange gradients
    mode: AbstractContextManager[object] = nullcontext() if phase.is_train else torch.no_grad()
    with run_spec.machine.apply_settings(), preserve_state(task), mode:
        for weight in weights:
            weight.grad = None
        task.run_forward(batch, run_spec.plan.position_of(phase, 0))
        return any(weight.grad is not None for weight in weights)
