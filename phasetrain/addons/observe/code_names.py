"""The names that the code of classes and functions uses."""

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from phasetrain.proof.held import is_custom


def list_code_names(definitions: Iterable[type | FunctionType]) -> set[str]:
    """Return the names in the code of classes and functions, and its texts, which `getattr` may
    take.

    Custom functions that the code refers to are read as well: below a decorator, in a closure, or
    as a global variable.
    """
    names: set[str] = set()
    left: list[object] = list(definitions)
    seen: set[int] = set()
    while left:
        definition = left.pop()
        if id(definition) in seen:
            continue
        seen.add(id(definition))
        if isinstance(definition, type):
            left += vars(definition).values()
        elif isinstance(definition, property):
            left += (definition.fget, definition.fset)
        elif isinstance(definition, staticmethod | classmethod):
            left.append(definition.__func__)
        elif isinstance(definition, FunctionType):
            codes = list(list_codes(definition.__code__))
            for code in codes:
                names.update(code.co_names)
                names.update(text for text in code.co_consts if isinstance(text, str))
            references = [
                definition.__globals__.get(name) for code in codes for name in code.co_names
            ]
            references += _list_closure(definition)
            left += (value for value in references if _is_custom_function(value))
    return names


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from list_codes(value)


def _list_closure(function: FunctionType) -> Iterator[object]:
    """Yield the values of the closure of a function, such as what a decorator wraps."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_custom_function(value: object) -> bool:
    return isinstance(value, FunctionType) and is_custom(value)
