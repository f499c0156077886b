"""Every bug of benchmarks/planted_bugs.json can be planted, and the tool tells caught from survived."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SOUND = "def double(number):\n    return 2 * number\n"
TEST = """
import subprocess, sys

from phasetrain.doubled import double

def test_four_in_this_process():
    assert double(2) == 4

def test_six_in_another_process():
    code = "from phasetrain.doubled import double; print(double(3))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "6"
"""


@pytest.fixture(scope="module")
def planted() -> Iterator[Any]:
    """Yield the module benchmarks/planted_bugs.py."""
    path = ROOT / "benchmarks" / "planted_bugs.py"
    spec = importlib.util.spec_from_file_location("planted_bugs", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "planted_bugs", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with a package of the same name, and its tests."""
    for name, text in (
        ("phasetrain/__init__.py", ""),
        ("phasetrain/doubled.py", SOUND),
        ("tests/test_doubled.py", TEST),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def make_bug(planted: Any, **changes: Any) -> Any:
    """Return the entry of a bug in the tree."""
    bug = planted.Bug(
        name="it adds",
        module="phasetrain/doubled.py",
        old="2 * number",
        new="2 + number",
        tests=("tests/test_doubled.py",),
        caught_by="tests/test_doubled.py::test_six_in_another_process",
    )
    return replace(bug, **changes)


@pytest.mark.addon
def test_every_bug_can_be_planted(planted: Any) -> None:
    bugs = planted.read_bugs()
    assert planted.list_obstacles(bugs) == []
    assert len(bugs) >= 64


@pytest.mark.parametrize(
    "changes",
    [
        {"module": "phasetrain/halved.py"},
        {"old": "3 * number"},
        {"old": "number"},
        {"new": "2 * number"},
        {"tests": ()},
        {"tests": ("tests/test_halved.py::test_four",)},
        {"caught_by": ""},
        {"survives": "nobody doubles"},
    ],
)
def test_entry_that_does_not_apply_is_named(planted: Any, tree: Path, changes: Any) -> None:
    assert planted.list_obstacles([make_bug(planted)], tree) == []
    [line] = planted.list_obstacles([make_bug(planted, **changes)], tree)
    assert line.startswith("it adds: ")


@pytest.mark.parametrize(
    ("new", "outcome", "test"),
    [
        ("2 + number", "caught", "tests/test_doubled.py::test_six_in_another_process"),
        ("number + number", "survived", ""),
    ],
)
def test_first_test_that_fails_is_recorded(
    planted: Any, tree: Path, new: str, outcome: str, test: str
) -> None:
    result = planted.try_bug(make_bug(planted, new=new), planted.Tree(tree), timeout=60)
    assert (result.outcome, result.test) == (outcome, test)
    assert (tree / "phasetrain" / "doubled.py").read_text() == SOUND


def test_tests_that_cannot_be_run_are_no_result(planted: Any, tree: Path) -> None:
    bug = make_bug(planted, tests=("tests/test_doubled.py::test_eight",))
    assert planted.try_bug(bug, planted.Tree(tree), timeout=60).outcome == "no result"
