"""Methods of a custom task that replace a method of its base class by accident."""

from inspect import Parameter, Signature, signature
from types import FunctionType

from phasetrain.errors import ConfigError
from phasetrain.proof.held import is_custom
from phasetrain.tasks import Task
from phasetrain.tasks.inference import Predictor

RENAMED = frozenset({"forward", "train_step", "test_step", "weight_of"})
"""Methods whose parameters may have other names: overriding them is usual."""


def check_replaced_methods(task: Task) -> None:
    """Reject a method of a custom task whose parameters differ from those of the public method of
    phasetrain that it replaces: a run would call it with other arguments.

    Args:
        task: the task of the run.

    Raises:
        ConfigError: there is one; the method is named.
    """
    kinds = type(task).__mro__
    for number, kind in enumerate(kinds):
        for name, method in vars(kind).items() if is_custom(kind) else ():
            if name.startswith("_") or not isinstance(method, FunctionType):
                continue
            bases = [base for base in kinds[number + 1 :] if name in vars(base)]
            base = next((base for base in bases if not is_custom(base)), None)
            # A run predicts nothing, and `generate` is a usual name.
            if base in (None, Predictor) or base.__module__.partition(".")[0] != "phasetrain":
                continue
            replaced = vars(base)[name]
            expected = "is no method"
            if isinstance(replaced, FunctionType):
                if _accepts(signature(method), signature(replaced), name):
                    continue
                takes = ", ".join(list(signature(replaced).parameters)[1:])
                expected = f"takes ({takes})"
            raise ConfigError(
                f"TASK.name: {kind.__name__}.{name}{signature(method)} replaces `{name}` of "
                f"{base.__name__}, which {expected} and which a run uses; if that is not intended, "
                "rename the method, otherwise use the names of these parameters, see "
                "docs/task.md#methods-of-a-task",
                code="task.signature",
            )


def _accepts(given: Signature, replaced: Signature, name: str) -> bool:
    """Return whether a method can be called like the method that it replaces."""
    expected = list(replaced.parameters.values())
    by_position = [
        parameter.name for parameter in expected if parameter.kind is not Parameter.KEYWORD_ONLY
    ]
    required = {
        parameter.name: None
        for parameter in expected
        if parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty
    }
    try:
        bound = given.bind(*by_position, **required)
    except TypeError:
        return False
    return name in RENAMED or all(
        given.parameters[own].kind is Parameter.VAR_POSITIONAL or own.strip("_") == value
        for own, value in list(bound.arguments.items())[1:]
        if value is not None and isinstance(value, str)
    )
