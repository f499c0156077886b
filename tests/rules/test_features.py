"""docs/features.md tells the truth: each row once, and every test that it names exists and is collected."""

import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = ("row", "feature", "key or API", "test")

_TEST = re.compile(r"`(tests/[^`]+\.py::[^`]+)`")


def rows(page: str) -> list[tuple[str, ...]]:
    """Return the cells of every row of the page's table, without its head."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]
    return [row for row in cells if row != HEAD and not set("".join(row)) <= set("-: ")]


def named_tests(row: tuple[str, ...]) -> list[str]:
    """Return the tests that a row names."""
    return _TEST.findall(row[-1])


def problems(page: str, collected: Collection[str]) -> list[str]:
    """Return what is wrong with the page.

    Args:
        collected: names of all tests, parameters in brackets left out.
    """
    found, seen = [], set()
    for row in rows(page):
        if len(row) != len(HEAD):
            found.append(f"{' | '.join(row)}: {len(row)} cells, expected {len(HEAD)}")
            continue
        if row[0] in seen:
            found.append(f"row {row[0]} stands there twice")
        seen.add(row[0])
        if not re.fullmatch(r"B?\d+", row[0]):
            found.append(f"row {row[0]!r}: expected one number, such as 14 or B1")
        if not named_tests(row):
            found.append(f"row {row[0]} names no test")
        found += [f"row {row[0]}: {test} is not collected" for test in named_tests(row) if test not in collected]
    return found


def collected(files: Iterable[str]) -> set[str]:
    """Return the tests that pytest finds in files, slow ones included."""
    existing = [file for file in sorted(set(files)) if (ROOT / file).is_file()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", *existing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "features.md").read_text("utf-8")


@pytest.fixture(scope="module")
def found(page: str) -> set[str]:
    files = [test.partition("::")[0] for row in rows(page) for test in named_tests(row)]
    return collected([*files, "tests/rules/test_features.py", "tests/no_such_file.py"])


def test_the_page_is_true(page: str, found: set[str]) -> None:
    assert rows(page)
    assert problems(page, found) == []


def test_what_does_not_exist_is_not_collected(found: set[str]) -> None:
    assert "tests/rules/test_features.py::test_rows_stand_in_order" in found
    assert "tests/rules/test_features.py::test_that_does_not_exist" not in found


def test_rows_stand_in_order(page: str) -> None:
    numbers = [int(row[0]) for row in rows(page) if row[0].isdigit()]
    assert numbers == sorted(numbers)


WRONG = """
| row | feature | key or API | test |
|---|---|---|---|
| 1 | a | `A` | `tests/a.py::test_a` |
| 1 | b | `B` | `tests/a.py::test_b` |
| x | c | `C` | |
| 4 | d | `tests/a.py::test_a` |
"""


def test_what_is_wrong_is_seen() -> None:
    assert problems(WRONG, {"tests/a.py::test_a"}) == [
        "row 1 stands there twice",
        "row 1: tests/a.py::test_b is not collected",
        "row 'x': expected one number, such as 14 or B1",
        "row x names no test",
        "4 | d | `tests/a.py::test_a`: 3 cells, expected 4",
    ]
