"""Errors over operators without a deterministic kernel, with the modules that call them."""

from collections.abc import Iterator
from contextlib import contextmanager

from phasetrain.config.addons import find_service
from phasetrain.engine.plan import Plan
from phasetrain.errors import ConfigError
from phasetrain.tasks import Task

NO_KERNEL = "does not have a deterministic implementation"
"""Part of torch's message."""

CODE = "machine.no_deterministic_kernel"
"""Code of the error that takes its place."""


def find_kernel_error(error: BaseException | None) -> BaseException | None:
    """Return the error by which torch has rejected an operator because of MACHINE.deterministic:
    the given one or a cause of it; None if there is none."""
    while error is not None:
        # Torch has no class for this error, so the text decides. The sentence of a task that quotes
        # it blames the shapes.
        if NO_KERNEL in str(error) and not isinstance(error, ConfigError):
            return error
        error = error.__cause__
    return None


def make_kernel_error(error: BaseException, name: str, note: str = "") -> ConfigError:
    """Return the error to raise instead.

    Args:
        error: the error of torch.
        name: name of the computation, such as the kind of step.
        note: text at the end.
    """
    text = (
        f"MACHINE.deterministic = true: {name} needs an operator that has no deterministic kernel: "
        f"{str(error).splitlines()[0]} Replace the module, or set MACHINE.deterministic=false, "
        f"with which a resume may differ in the last bits {note}"
    )
    return ConfigError(text.rstrip(), code=CODE)


@contextmanager
def explain_missing_kernels(task: Task, plan: Plan) -> Iterator[None]:
    """Raise a ConfigError for an operator that torch rejects because of MACHINE.deterministic.

    Its notes name the modules of the first train step that call such operators, with replacements.
    The task must not be trained after an error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) and error.code == CODE:
            _name_modules(error, task, plan)
            raise
        cause = find_kernel_error(error)
        if cause is None:
            raise
        kernel_error = make_kernel_error(cause, "a step")
        _name_modules(kernel_error, task, plan)
        raise kernel_error from cause


def _name_modules(error: ConfigError, task: Task, plan: Plan) -> None:
    if name_operators := find_service("name_operators"):
        for line in name_operators(task, plan):
            error.add_note(f"  {line}")
