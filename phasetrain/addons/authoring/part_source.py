"""Reads the parameters of phasetrain's parts from the source code without importing it, so that a
misspelt parameter is reported before torch is imported."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from phasetrain.config.parts import REGISTRIES
from phasetrain.config.registry import Signature

PACKAGE = __name__.partition(".")[0]
FOLDER = Path(__file__).parents[3]


def read_signature(module: str, kind: str, name: str) -> Signature | None:
    """Return the parameters of the part that a module registers under a name.

    Returns:
        None if the module has to be imported for them: the part inherits parameters, or it belongs
        to another package.
    """
    if not module.startswith(f"{PACKAGE}."):
        return None
    names = _read_module(module)
    registered = _find_registered(names.statements, REGISTRIES[kind].partition(":")[2], name)
    declared = _list_parameters(registered, names)
    if declared is None:
        return None
    try:
        types = {
            parameter.name: names.evaluate(parameter.annotation)
            for parameter in declared
            if parameter.annotation is not None
        }
    except NameError:  # below TYPE_CHECKING, as in `signature_of`
        types = {}
    optional = frozenset(
        parameter.name
        for parameter in declared
        if isinstance(parameter.default, ast.Constant) and parameter.default.value is None
    )
    return Signature(tuple(parameter.name for parameter in declared), types, optional)


class _Parameter(NamedTuple):
    """A parameter in the source."""

    name: str
    annotation: ast.expr | None
    default: ast.expr | None


def _find_registered(statements: list[ast.stmt], registry: str, name: str) -> ast.stmt | None:
    """Return the function or the class that is registered under a name."""
    decorator = ast.dump(ast.parse(f"{registry}.register({name!r})", mode="eval").body)
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and (
            decorator in map(ast.dump, statement.decorator_list)
        ):
            return statement
    return None


def _list_parameters(registered: ast.stmt | None, names: "_ModuleNames") -> list[_Parameter] | None:
    """Return the parameters of a function or a class; None for a class that inherits some."""
    if isinstance(registered, ast.FunctionDef):
        signature = registered.args
        arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
        defaults: list[ast.expr | None] = [*signature.defaults, *signature.kw_defaults]
        no_defaults = [None] * (len(arguments) - len(defaults))
        return [
            _Parameter(argument.arg, argument.annotation, default)
            for argument, default in zip(arguments, [*no_defaults, *defaults], strict=True)
            if argument.arg != "self"
        ]
    if not isinstance(registered, ast.ClassDef):
        return None
    for statement in registered.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _list_parameters(statement, names)
    bases = [names.find_class(ast.unparse(base)) for base in registered.bases]
    if not _is_dataclass(registered) or any(map(_is_dataclass, bases)):
        return None
    return [
        _Parameter(statement.target.id, statement.annotation, statement.value)
        for statement in registered.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if statement.target.id != "_"  # `_: KW_ONLY`
    ]


def _is_dataclass(statement: ast.ClassDef | None) -> bool:
    decorators = statement.decorator_list if statement is not None else ()
    return any("dataclass" in ast.unparse(decorator) for decorator in decorators)


class _ModuleNames(dict[str, Any]):
    """The names that the annotations of a module use, without importing it.

    A class is replaced by a placeholder of the same name and module, since annotations are only
    compared and described.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module
        # Not by `find_spec`, which imports the packages above the module.
        path = FOLDER.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.statements = ast.parse(path.read_text("utf-8")).body
        # A package imports its public names when they are used: `export_lazily`.
        for block in list(self.statements):
            if isinstance(block, ast.If) and block.orelse:
                self.statements += block.body

    def evaluate(self, annotation: ast.expr) -> Any:
        """Return the value of an annotation."""
        return eval(compile(ast.Expression(annotation), self.module, "eval"), {}, self)

    def find_class(self, name: str) -> ast.ClassDef | None:
        """Return the source of a class of phasetrain; None for any other name."""
        for statement in self.statements:
            match statement:
                case ast.ClassDef(name=class_name) if class_name == name:
                    return statement
                case ast.ImportFrom(module=str(module), names=names):
                    is_own = module.startswith(f"{PACKAGE}.")
                    if is_own and name in (alias.name for alias in names):
                        return _read_module(module).find_class(name)
        return None

    def __missing__(self, name: str) -> Any:
        value = next(self._find_values(name), None)
        if value is None:
            raise KeyError(name)
        self[name] = value
        return value

    def _find_values(self, name: str) -> Iterator[Any]:
        for statement in self.statements:
            match statement:
                case ast.ImportFrom(module=str(module), names=names):
                    if name in (alias.name for alias in names):
                        yield _find_imported(module, name)
                case ast.Import(names=names):
                    if name in (alias.name for alias in names):
                        yield _make_class(name, "")
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    yield self.evaluate(value)
                case ast.ClassDef(name=class_name) if class_name == name:
                    yield _make_class(name, self.module)


class _Placeholder(type):
    """The metaclass of placeholders for modules and classes that are not imported; a placeholder
    has any attribute and takes type arguments."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_class(name, f"{cls.__module__}.{cls.__name__}".lstrip("."))

    def __getitem__(cls, item: object) -> Any:
        return cls


def _find_imported(module: str, name: str) -> Any:
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return vars(import_module(module))[name]
    if root == PACKAGE:
        return _read_module(module)[name]
    return _make_class(name, module)


def _make_class(name: str, module: str) -> type:
    return _Placeholder(name, (), {"__module__": module})


@cache
def _read_module(module: str) -> _ModuleNames:
    return _ModuleNames(module)
