"""Checks that the methods of a hook take the arguments with which they are called."""

from inspect import Parameter, signature
from operator import attrgetter
from typing import Any

from phasetrain.errors import ConfigError


def check_signatures(label: str, hook: Any, base: type) -> None:
    """Reject a hook with a method that cannot be called as the run calls it.

    Args:
        label: label of the hook in section HOOKS.
        hook: the hook.
        base: the base class of hooks, which declares the arguments.

    Raises:
        ConfigError: it is no hook, or a method has other parameters; the method is named.
    """
    if not isinstance(hook, base):
        raise ConfigError(
            f"HOOKS.{label}: {type(hook).__name__} is not a hook; expected a subclass of "
            "phasetrain.hooks.Hook",
            code="config.wrong_part",
        )
    for name, declared in vars(base).items():
        if name.startswith("_") or not callable(declared):
            continue
        method = attrgetter(name)(hook)
        expected = list(signature(declared).parameters.values())[1:]
        try:
            found = signature(method)
        except (TypeError, ValueError):  # a callable without a Python signature
            continue
        try:
            found.bind(*(one.name for one in expected if one.kind is not Parameter.KEYWORD_ONLY))
        except TypeError as error:
            takes = ", ".join(one.name for one in expected)
            raise ConfigError(
                f"HOOKS.{label}: {type(hook).__name__}.{name}{found} cannot be called with "
                f"({takes}): {error}; define it as {name}(self, {takes})",
                code="hook.signature",
            ) from None
