"""Checks for schedules that nothing applies: in custom train steps, and of models."""

import logging

from torch import nn

from phasetrain.addons.observe.code_names import list_code_names
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.config.registry import parameters
from phasetrain.proof.held import is_custom
from phasetrain.tasks import Task

log = logging.getLogger(__name__)


def check_unscheduled_steps(run_spec: RunSpec, task: Task) -> None:
    """Warn if a custom `train_step` calls `begin_update` nowhere, and the config has a schedule,
    stages or weights that are frozen at first.

    Args:
        run_spec: the run.
        task: its task.
    """
    config = run_spec.setup.config
    keys = {
        "OPTIMIZER.SCHEDULES": config.OPTIMIZER.SCHEDULES,
        "PHASES.stages": config.PHASES.stages,
        "MODEL.freeze_updates": config.MODEL.freeze_updates,
    }
    unapplied = [key for key, value in keys.items() if value]
    if run_spec.plan.first_training is None or not unapplied or begins_updates(type(task)):
        return
    log.warning(
        "TASK.name: train_step of %s does not call self.begin_update(at), so %s has no effect "
        "within an epoch; call it at the beginning of train_step",
        type(task).__name__,
        " and ".join(unapplied),
    )


def check_unused_advance(task: Task) -> None:
    """Warn if a part of the model has a method `advance(where, updates)`, which a task calls for
    losses only.

    Args:
        task: the task of the run; nothing is reported if it is a custom one, which may call it.
    """
    if is_custom(type(task)):
        return
    losses = set(nn.ModuleList([task.parts.loss, *task.parts.losses]).modules())
    for module in task.parts.model.modules():
        advance = getattr(type(module), "advance", None)
        if not callable(advance) or module in losses:
            continue
        if list(parameters(advance))[-2:] == ["where", "updates"]:
            log.warning(
                "MODEL: advance(where, updates) of %s is never called, only the method of a loss "
                "is: let the model return what the loss needs, and move `advance` to a custom loss "
                "with needs_target = False, see docs/cookbook/training.md#let-the-model-compute-"
                "its-own-loss",
                type(module).__name__,
            )


def begins_updates(task_class: type[Task]) -> bool:
    """Return whether a task has the train step of this package, or custom code that calls
    `begin_update` or the train step of its base class."""
    if not is_custom(task_class.train_step):
        return True
    custom_classes = (
        base
        for base in task_class.__mro__
        if base.__module__.partition(".")[0] not in ("phasetrain", "builtins")
    )
    return bool(list_code_names(custom_classes) & {"begin_update", "train_step"})
