"""Checks for schedules that nothing applies: in custom train steps, and of models."""

import logging
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

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
    given = [key for key, value in keys.items() if value]
    if run_spec.plan.first_training is None or not given or begins_updates(type(task)):
        return
    log.warning(
        "TASK.name: train_step of %s does not call self.begin_update(at), so %s has no effect "
        "within an epoch; call it first, in each step",
        type(task).__name__,
        " and ".join(given),
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
    """Return whether a task has the train step of this package, or code of its own that calls
    `begin_update`, or the train step of its base class."""
    if not is_custom(task_class.train_step):
        return True
    names = set[str]()
    for base in filter(is_custom, task_class.__mro__):
        for value in vars(base).values():
            if isinstance(value, FunctionType):
                for code in _list_codes(value.__code__):
                    names.update(code.co_names)
    return bool(names & {"begin_update", "train_step"})


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _list_codes(value)
