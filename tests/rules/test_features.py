"""docs/features.md names each row once, and tests that exist."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = "tests/rules/test_features.py"
HEAD = ("row", "feature", "key or API", "test")

_TEST = re.compile(r"`(tests/[^`]+\.py::[^`]+)`")


def rows(page: str) -> list[tuple[str, ...]]:
    """Return the cells of every row of the page's first table, without its head."""
    lines = [line for line in page.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]
    return [row for row in cells if row != HEAD and not set("".join(row)) <= set("-: ")]


def named_tests(row: tuple[str, ...]) -> list[str]:
    """Return the tests that a row names."""
    return _TEST.findall(row[-1])


def problems(page: str, tests: Collection[str]) -> list[str]:
    """Return what is wrong with the page.

    Args:
        tests: names of the tests that exist, without parameters in brackets.
    """
    found, seen = [], set()
    for row in rows(page):
        if len(row) != len(HEAD):
            found.append(f"{' | '.join(row)}: {len(row)} cells, expected {len(HEAD)}")
            continue
        if row[0] in seen:
            found.append(f"row {row[0]} is listed twice")
        seen.add(row[0])
        if not re.fullmatch(r"B?\d+|\d+-\d+", row[0]):
            found.append(f"row {row[0]!r}: expected a number or a range, such as 14, 29-33 or B1")
        if not named_tests(row):
            found.append(f"row {row[0]} names no test")
        found += [
            f"row {row[0]}: {test} does not exist" for test in named_tests(row) if test not in tests
        ]
    return found


def existing(tests: Iterable[str]) -> set[str]:
    """Return which of the tests exist, slow ones included."""
    tests = set(tests)
    files = {test.partition("::")[0] for test in tests}
    return tests & {
        f"{file}::{name}" for file in files if (ROOT / file).is_file() for name in names_of(file)
    }


def names_of(file: str) -> Iterator[str]:
    """Yield the names of the tests that pytest collects from a file, those of a class as
    `Class::test`."""
    # Read from the source: pytest would import every file, which takes ten seconds.
    for node in ast.parse((ROOT / file).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node.name
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name.startswith("test"):
                    yield f"{node.name}::{member.name}"


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "features.md").read_text("utf-8")


@pytest.fixture(scope="module")
def found(page: str) -> set[str]:
    return existing(_TEST.findall(page))


@pytest.mark.addon
def test_each_row_of_the_table_names_existing_tests(page: str, found: set[str]) -> None:
    assert rows(page)
    assert problems(page, found) == []


@pytest.mark.addon
def test_text_below_the_table_names_existing_tests(page: str, found: set[str]) -> None:
    beyond = page.partition("## Beyond")[2]
    assert len(_TEST.findall(beyond)) >= 10
    assert [test for test in _TEST.findall(beyond) if test not in found] == []


def numbers(row: str) -> set[str]:
    """Return the numbers that a row or a range of rows stands for."""
    first, dash, last = row.partition("-")
    return {str(n) for n in range(int(first), int(last) + 1)} if dash else {row}


def test_every_feature_has_a_row(page: str) -> None:
    proved = set().union(*(numbers(row[0]) for row in rows(page)))
    assert proved == {str(n) for n in range(1, 114)} | {f"B{n}" for n in range(1, 13)}


def test_only_tests_that_exist_are_found() -> None:
    own = f"{HERE}::test_only_tests_that_exist_are_found"
    method = "tests/end_to_end/test_stages.py::TestLosses::test_another_loss_in_another_stage"
    unknown = (f"{HERE}::test_that_does_not_exist", "tests/no_such_file.py::test_a")
    assert existing([own, method, *unknown]) == {own, method}
    assert existing(unknown[1:]) == set()


def test_rows_are_in_order(page: str) -> None:
    firsts = [int(row[0].partition("-")[0]) for row in rows(page) if row[0][0].isdigit()]
    assert firsts == sorted(firsts)


WRONG = """
| row | feature | key or API | test |
|---|---|---|---|
| 1 | a | `A` | `tests/a.py::test_a` |
| 1 | b | `B` | `tests/a.py::test_b` |
| x | c | `C` | |
| 4 | d | `tests/a.py::test_a` |
"""


def test_wrong_rows_are_reported() -> None:
    assert problems(WRONG, {"tests/a.py::test_a"}) == [
        "row 1 is listed twice",
        "row 1: tests/a.py::test_b does not exist",
        "row 'x': expected a number or a range, such as 14, 29-33 or B1",
        "row x names no test",
        "4 | d | `tests/a.py::test_a`: 3 cells, expected 4",
    ]
