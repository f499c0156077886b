"""Whether a value of the config fits the annotation of a parameter, and how to say what would."""

import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_LISTS = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
_MAPPINGS = (dict, Mapping)
_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {str: "a text", bool: "true or false", type(None): "null"}
)


def fits(value: Any, annotation: Any) -> bool:
    """Tell whether `value`, as YAML gives it, can be passed to a parameter annotated so.

    int, float (an int will do), bool, str, None, unions, Literal, lists, tuples and mappings with
    the types inside and `torch.Tensor` (numbers, or nested lists of them) are compared; any other
    annotation takes everything.
    """
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in args)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    plain = origin or annotation
    if plain in (None, type(None)):
        return value is None
    if plain in (int, float):
        return not isinstance(value, bool) and isinstance(
            value, int if plain is int else int | float
        )
    if plain in (bool, str):
        return isinstance(value, plain)
    if plain is Path:
        return isinstance(value, str)
    if plain in _MAPPINGS:
        return isinstance(value, Mapping) and (
            len(args) < 2 or all(fits(item, args[1]) for item in value.values())
        )
    if plain in _LISTS:
        return isinstance(value, list | tuple) and _items_fit(value, plain, args)
    if _is_tensor(annotation):
        return _is_tensor_data(value)
    return True


def described(annotation: Any) -> str:
    """Return the words for an annotation: `int or null`, `'a' or 'b'`, `a list of float`."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(described(choice) for choice in args))
    if origin is Literal:
        return " or ".join(repr(choice) for choice in args)
    plain = origin or annotation
    if plain in _MAPPINGS:
        if len(args) > 1:
            return f"a mapping to {described(args[1])}"
        return "a mapping"
    if plain is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(described(item) for item in args)}"
    if plain in _LISTS:
        if args:
            return f"a list of {described(args[0])}"
        return "a list"
    if plain is Path:
        return "a path"
    if _is_tensor(annotation):
        return "numbers"
    return _WORDS.get(type(None) if plain is None else plain) or (
        plain.__name__ if isinstance(plain, type) else str(plain)
    )


def _items_fit(value: Sequence[Any], plain: Any, args: tuple[Any, ...]) -> bool:
    if plain is tuple and args and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(map(fits, value, args))
    return not args or all(fits(item, args[0]) for item in value)


def _is_tensor(annotation: Any) -> bool:  # by name: checking a config must not import torch
    return (
        isinstance(annotation, type)
        and annotation.__module__ == "torch"
        and annotation.__name__ == "Tensor"
    )


def _is_tensor_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_tensor_data(item) for item in value)
    return isinstance(value, int | float)
