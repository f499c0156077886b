"""Sizes: the loop stays short, and so do functions and files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "phasetrain").rglob("*.py"))
TOOLS = sorted((ROOT / "tools").glob("*.py"))

FUNCTION_UNDER = 60
FILE_UNDER = 400
ENGINE_UNDER = 150
RUN_PHASE_UNDER = 30
TOOL_UNDER = 60


def function_lengths(source: str) -> dict[str, int]:
    """Return the number of lines of every function, from `def` to its last line, by `line:name`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return {f"{node.lineno}:{node.name}": (node.end_lineno or 0) - node.lineno + 1 for node in nodes}


def too_long(source: str, *, function_under: int, file_under: int) -> list[str]:
    """Return a line for each function, and for the file, that has reached its limit."""
    found = [
        f"{name}: {lines} lines, a function has less than {function_under}"
        for name, lines in function_lengths(source).items()
        if lines >= function_under
    ]
    lines = len(source.splitlines())
    return found + ([f"{lines} lines, a file has less than {file_under}"] if lines >= file_under else [])


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_package(path: Path) -> None:
    assert too_long(path.read_text("utf-8"), function_under=FUNCTION_UNDER, file_under=FILE_UNDER) == []


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_tools(path: Path) -> None:
    assert too_long(path.read_text("utf-8"), function_under=FUNCTION_UNDER, file_under=TOOL_UNDER) == []


def test_engine() -> None:
    source = (ROOT / "phasetrain" / "engine.py").read_text("utf-8")
    lengths = {name.partition(":")[2]: lines for name, lines in function_lengths(source).items()}
    assert lengths["run_phase"] < RUN_PHASE_UNDER
    assert len(source.splitlines()) < ENGINE_UNDER


def test_what_is_too_long_is_seen() -> None:
    source = "def short():\n    pass\n\n\nasync def long():\n    pass\n    pass\n"
    assert too_long(source, function_under=3, file_under=7) == [
        "5:long: 3 lines, a function has less than 3",
        "7 lines, a file has less than 7",
    ]
