"""Check values of the config against type annotations, and describe the types to users."""

import operator
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

_LISTS = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
_COMPARE: Mapping[str, tuple[str, Any]] = types.MappingProxyType(
    {
        "ge": (">=", operator.ge),
        "gt": (">", operator.gt),
        "le": ("<=", operator.le),
        "lt": ("<", operator.lt),
    }
)
NO_BOUNDS: Mapping[str, float] = types.MappingProxyType({})


class Shape(NamedTuple):
    """The values that a type annotation is for, however it is spelled.

    Attributes:
        form: `union` and `choice` of `args`; `list` and `mapping`, with the type of their items in
            `args` unless they take any; `tuple`, a list with the types `args`; `number`, an int or
            a float; `plain`, every other type.
        type: the type itself, None for null.
        args: see `form`.
    """

    form: Literal["union", "choice", "list", "mapping", "tuple", "number", "plain"]
    type: Any
    args: tuple[Any, ...] = ()


def read_shape(annotation: Any) -> Shape:
    """Return the shape of an annotation."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin in (Union, types.UnionType):
        return Shape("union", origin, args)
    if origin is Literal:
        return Shape("choice", origin, args)
    plain = origin or annotation
    if plain in (int, float):
        return Shape("number", plain)
    if plain in (dict, Mapping):
        return Shape("mapping", plain, _without_any(args[1:]))
    if plain is tuple and args and args[-1] is not Ellipsis:
        return Shape("tuple", plain, args)
    if plain in _LISTS:
        return Shape("list", plain, _without_any(args[:1]))
    return Shape("plain", None if plain is types.NoneType else plain)


def _without_any(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return () if items == (Any,) else items


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
    form, plain, args = read_shape(annotation)
    if form == "union":
        return any(fits(value, choice, bounds) for choice in args)
    if form == "choice":
        # Types are compared too, since True == 1 == 1.0.
        return any(type(value) is type(choice) and value == choice for choice in args)
    if form == "number":
        return _is_number_within(value, plain, bounds)
    if form == "mapping":
        return isinstance(value, Mapping) and _items_fit(value.values(), args, bounds)
    if form == "list":
        return isinstance(value, list | tuple) and _items_fit(value, args, bounds)
    if form == "tuple":
        is_list = isinstance(value, list | tuple)
        return is_list and len(value) == len(args) and all(map(fits, value, args))
    return _fits_plain(value, plain)


def list_choices(annotation: Any) -> list[str]:
    """Return the texts that an annotation lists, in a Literal or in a union with one."""
    form, _, args = read_shape(annotation)
    if form == "choice":
        return [choice for choice in args if isinstance(choice, str)]
    if form == "union":
        return [text for choice in args for text in list_choices(choice)]
    return []


def describe_type(annotation: Any, bounds: Mapping[str, float] = NO_BOUNDS) -> str:
    """Return an annotation in words: `int >= 1 or null`, `'a' or 'b'`, `list of float`."""
    form, plain, args = read_shape(annotation)
    if form == "union":
        return " or ".join(dict.fromkeys(describe_type(choice, bounds) for choice in args))
    if form == "choice":
        return " or ".join(repr(choice) for choice in args)
    if form == "number":
        limits = " and ".join(f"{_COMPARE[name][0]} {bound}" for name, bound in bounds.items())
        return f"{plain.__name__} {limits}".rstrip()
    items = ", ".join(map(describe_type, args))
    if form == "mapping":
        return f"mapping to {items}" if items else "mapping"
    if form == "tuple":
        return f"list of {len(args)}: {items}"
    if form == "list":
        return f"list of {items}" if items else "list"
    return _describe_plain(plain)


def _describe_plain(plain: Any) -> str:
    if plain is None:
        return "null"
    if plain is Path:
        return "path"
    if is_tensor(plain):
        return "numbers"
    return plain.__name__ if isinstance(plain, type) else str(plain)


def _fits_plain(value: Any, plain: Any) -> bool:
    if plain is None:
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
    values: Iterable[Any], types_of_items: tuple[Any, ...], bounds: Mapping[str, float]
) -> bool:
    return all(fits(value, item, bounds) for item in types_of_items for value in values)


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
