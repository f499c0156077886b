"""Public names of packages, whose modules are imported when the names are used."""

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from phasetrain.config.moved import import_moved_name


def export_lazily(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports its public names on first use.

    The imports are those below `if TYPE_CHECKING` of the package, which type checkers read:

        if TYPE_CHECKING:
            from phasetrain.losses.cross_entropy import CrossEntropy
        else:
            __getattr__, __dir__ = export_lazily(__name__)

    A name that has moved to an add-on is imported from there, with a warning.

    Args:
        package: name of the package, `__name__` in it.
    """

    def get_attribute(name: str) -> object:
        module = find_exports(package).get(name)
        if module is None:
            return import_moved_name(package, name)
        value = vars(importlib.import_module(module))[name]
        vars(sys.modules[package])[name] = value
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *find_exports(package)})

    return get_attribute, list_names


def find_public(module: ModuleType, name: str) -> object | None:
    """Return the attribute of a module, which a package of phasetrain may import now; None if there
    is no attribute of this name."""
    load: Any = vars(module).get("__getattr__")
    # Not that of another module, which may import anything.
    is_lazy = load is not None and load.__module__ == __name__
    if is_lazy and name in find_exports(module.__name__):
        load(name)
    return vars(module).get(name)


@cache
def find_exports(package: str) -> Mapping[str, str]:
    """Return name -> module of the imports of a package below `if TYPE_CHECKING`."""
    source = Path(str(sys.modules[package].__file__)).read_text("utf-8")
    return {
        alias.name: statement.module
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }
