"""Check values of the config against type annotations, and describe the types to users."""

import operator
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

LISTS = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
"""Types of parameters that take a list of YAML."""
MAPPINGS = (dict, Mapping)
"""Types of parameters that take a mapping of YAML."""
_COMPARE: Mapping[str, tuple[str, Any]] = types.MappingProxyType(
    {
        "ge": (">=", operator.ge),
        "gt": (">", operator.gt),
        "le": ("<=", operator.le),
        "lt": ("<", operator.lt),
    }
)
NO_BOUNDS: Mapping[str, float] = types.MappingProxyType({})


@dataclass(frozen=True)
class ValueType:
    """The type of a key's values.

    Attributes:
        annotation: type annotation.
        bounds: bounds of numbers: `ge`, `gt`, `le`, `lt`.
    """

    annotation: Any
    bounds: Mapping[str, float] = field(default_factory=lambda: NO_BOUNDS)

    @property
    def text(self) -> str:
        """The type in words: `int >= 1 or null`."""
        return describe_type(self.annotation, self.bounds)

    def fits(self, value: Any) -> bool:
        """Whether `value` is of the type and finite; an int is a float, a bool is not a number."""
        # NaN passes no comparison with a bound, but a key without bounds would accept it.
        if isinstance(value, float) and not isfinite(value):
            return False
        return fits(value, self.annotation, self.bounds)


def fits(value: Any, annotation: Any, bounds: Mapping[str, float] = NO_BOUNDS) -> bool:
    """Return whether `value`, as read from YAML, can be passed to a parameter with this annotation.

    Compared are int, float (which accepts an int), bool, str, None, unions, Literal, lists, tuples
    and mappings with the types of their items, and `torch.Tensor` (numbers, or nested lists of
    numbers). Any other annotation accepts everything.

    Args:
        value: the value.
        annotation: the annotation of the parameter.
        bounds: bounds of numbers: `ge`, `gt`, `le`, `lt`.
    """
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice, bounds) for choice in args)
    if origin is Literal:
        # Types are compared too, since True == 1 == 1.0.
        return any(type(value) is type(choice) and value == choice for choice in args)
    plain = origin or annotation
    if plain in (int, float):
        return _is_number_within(value, plain, bounds)
    if plain in MAPPINGS:
        return isinstance(value, Mapping) and (
            len(args) < 2 or all(fits(item, args[1], bounds) for item in value.values())
        )
    if plain in LISTS:
        return isinstance(value, list | tuple) and _items_fit(value, plain, args, bounds)
    return _fits_plain(value, plain)


def list_choices(annotation: Any) -> list[str]:
    """Return the texts that an annotation lists, in a Literal or in a union with one."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [text for choice in get_args(annotation) for text in list_choices(choice)]


def describe_type(annotation: Any, bounds: Mapping[str, float] = NO_BOUNDS) -> str:
    """Return an annotation in words: `int >= 1 or null`, `'a' or 'b'`, `list of float`."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(choice, bounds) for choice in args))
    if origin is Literal:
        return " or ".join(repr(choice) for choice in args)
    plain = origin or annotation
    if plain in MAPPINGS:
        if len(args) < 2 or args[1] is Any:
            return "mapping"
        return f"mapping to {describe_type(args[1])}"
    if plain is tuple and args and args[-1] is not Ellipsis:
        return f"list of {len(args)}: {', '.join(describe_type(item) for item in args)}"
    if plain in LISTS:
        if not args or args[0] is Any:
            return "list"
        return f"list of {describe_type(args[0])}"
    return _describe_plain(plain, bounds)


def _describe_plain(plain: Any, bounds: Mapping[str, float]) -> str:
    if plain in (None, type(None)):
        return "null"
    if plain is Path:
        return "path"
    if is_tensor(plain):
        return "numbers"
    if plain in (int, float):
        limits = " and ".join(f"{_COMPARE[name][0]} {bound}" for name, bound in bounds.items())
        return f"{plain.__name__} {limits}".rstrip()
    return plain.__name__ if isinstance(plain, type) else str(plain)


def _fits_plain(value: Any, plain: Any) -> bool:
    if plain in (None, type(None)):
        return value is None
    if plain in (bool, str):
        return isinstance(value, plain)
    if plain is Path:
        return isinstance(value, str)  # YAML has no paths
    return not is_tensor(plain) or _is_tensor_data(value)


def _is_number_within(value: Any, kind: type, bounds: Mapping[str, float]) -> bool:
    allowed = int if kind is int else int | float
    # bool is a subclass of int, but `workers: true` is a mistake.
    if isinstance(value, bool) or not isinstance(value, allowed):
        return False
    return all(_COMPARE[name][1](value, bound) for name, bound in bounds.items())


def _items_fit(
    value: Sequence[Any], plain: Any, args: tuple[Any, ...], bounds: Mapping[str, float]
) -> bool:
    if plain is tuple and args and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(map(fits, value, args))
    return not args or all(fits(item, args[0], bounds) for item in value)


def is_tensor(annotation: Any) -> bool:
    """Return whether an annotation is `torch.Tensor`."""
    # Compared by name, since checking a config must not import torch.
    return (
        isinstance(annotation, type)
        and annotation.__module__ == "torch"
        and annotation.__name__ == "Tensor"
    )


def _is_tensor_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_tensor_data(item) for item in value)
    return isinstance(value, int | float)
