"""Each public name has a docstring, and each error a person may meet says with which exit code the
run ends."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from phasetrain.errors import PhasetrainError

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "phasetrain").rglob("*.py")) + sorted((ROOT / "tools").glob("*.py"))

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(source: str) -> list[str]:
    """Return the module (as line 0), its public classes and functions, and their public methods,
    without docstring."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else ["0: the module"]
    return found + [
        f"{node.lineno}: {name}" for name, node in _public(tree) if not ast.get_docstring(node)
    ]


def _public(node: ast.Module | ast.ClassDef, above: str = "") -> Iterator[tuple[str, Definition]]:
    for inner in node.body:
        if isinstance(inner, Definition) and not inner.name.startswith("_"):
            name = f"{above}{inner.name}"
            yield name, inner
            if isinstance(inner, ast.ClassDef):
                yield from _public(inner, f"{name}.")


def errors() -> list[type[PhasetrainError]]:
    """Return every error class of the package that ends a run with a message."""
    for path in sorted((ROOT / "phasetrain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] not in ("__init__", "__main__"):
            importlib.import_module(".".join(parts))
    found, waiting = [], [PhasetrainError]
    while waiting:
        error = waiting.pop()
        found.append(error)
        waiting += [
            below for below in error.__subclasses__() if below.__module__.startswith("phasetrain.")
        ]
    return found


def says_exit_code(error: type[PhasetrainError]) -> bool:
    """Tell whether the docstring has the exit code."""
    return f"exit code {error.exit_code})" in " ".join((error.__doc__ or "").split())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_have_docstrings(path: Path) -> None:
    assert undocumented(path.read_text("utf-8")) == []


def test_missing_docstring_is_reported() -> None:
    source = "class Loss:\n    '''Doc.'''\n    def forward(self): ...\n    def _own(self): ...\ndef build(): ...\n"
    assert undocumented(source) == ["0: the module", "3: Loss.forward", "5: build"]


def test_errors_document_their_exit_code() -> None:
    assert [error.__qualname__ for error in errors() if not says_exit_code(error)] == []


def test_undocumented_exit_code_is_reported() -> None:
    class SilentError(PhasetrainError):
        """Something went wrong (exit code 1)."""

        exit_code = 9

    assert not says_exit_code(SilentError)
