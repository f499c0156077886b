"""What commands on the model of a run leave out: the forward pass that a custom task defines."""

import logging
from typing import Any

from phasetrain.tasks import Task
from phasetrain.tasks.inference import Predictor

log = logging.getLogger(__name__)

METHODS = ("forward", "output_of")
"""Methods of tasks between a batch and the outputs that tests measure."""


def find_task_forward(task: Any) -> str | None:
    """Return the method of a custom task with which tests compute outputs, as `forward
    (module.Class)`; None if the task has those of phasetrain.

    Args:
        task: class of the task, or the function that makes it, about which nothing is known.
    """
    if not isinstance(task, type):
        return None
    for cls in task.__mro__:
        if cls is Task or cls.__module__.startswith("phasetrain."):
            return None
        for method in METHODS:
            if method in vars(cls):
                return f"{method} ({cls.__module__}.{cls.__qualname__})"
    return None


def predicts_by_itself(task: Any) -> bool:
    """Return whether a prediction of a task, or of a class of tasks, is more than the output of the
    model: it decodes it."""
    kind: Any = task if isinstance(task, type) else type(task)
    return kind._predict_slice is not Predictor._predict_slice


def warn_of_task_forward(task: Any, *, decodes: bool = False) -> None:
    """Warn if tests use a forward pass of a custom task that a command does not call.

    Args:
        task: as in `find_task_forward`.
        decodes: whether the command calls `predict` of the task, which may be custom as well.
    """
    method = find_task_forward(task)
    if method is None:
        return
    if decodes and (predicts_by_itself(task) or task.predict is not Predictor.predict):
        return
    log.warning(
        "the task's own %s is not called: outputs are those of the model; tests call it", method
    )


def describe_task_call(task: Any) -> str:
    """Return why a model may reject the input alone, for the end of an error of its forward pass;
    empty if tests call it in the same way.

    Args:
        task: as in `find_task_forward`.
    """
    if isinstance(task, type) and issubclass(task, Predictor) and predicts_by_itself(task):
        return (
            f"; the task {task.__name__} calls it with more than the input, and this command with "
            "the input alone: `phasetrain predict` and task.predict in Python decode with the task"
        )
    method = find_task_forward(task)
    if method is None:
        return ""
    return (
        f"; the task's own {method} calls it in another way, and this command with the input "
        "alone: let the model's forward take that, as it is called in eval mode"
    )
