"""docs/reliability.md lists every fault once, with existing tests or the reason why it cannot be
produced."""

import ast
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from feature_table import list_test_functions

ROOT = Path(__file__).parents[2]
HERE = "tests/rules/test_reliability.py"
FAULTS = [f"F{number:02d}" for number in range(1, 49)]
NOT_HERE = "not here: "


def rows(page: str) -> list[list[str]]:
    """Return the cells of every row of the table of faults."""
    lines = [line for line in page.splitlines() if re.match(r"\| F\d+ ", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named_tests(row: Iterable[str]) -> list[str]:
    """Return the tests that the last cell of a row names."""
    return re.findall(r"`(tests/[^`]+\.py::[^`]+)`", list(row)[-1])


def existing_tests(tests: Iterable[str]) -> set[str]:
    """Return which of the tests exist, slow ones included."""
    tests = set(tests)
    found = set()
    for file in {test.partition("::")[0] for test in tests}:
        if (ROOT / file).is_file():
            module = ast.parse((ROOT / file).read_text("utf-8"))
            found |= {f"{file}::{name}" for name, _ in list_test_functions(module)}
    return tests & found


def problems(page: str, existing: Collection[str]) -> list[str]:
    """Return what is wrong with the page.

    Args:
        existing: names of the tests that exist, without parameters in brackets.
    """
    found = []
    if [row[0] for row in rows(page)] != FAULTS:
        found.append("the rows are not F01 to F48, each once and in order")
    for row in rows(page):
        tests = named_tests(row)
        if len(row) != 4:
            found.append(f"{row[0]}: {len(row)} cells, expected 4")
        elif not tests and not row[3].startswith(NOT_HERE):
            found.append(f"{row[0]} names no test and no reason")
        elif tests and not row[2]:
            found.append(f"{row[0]} does not say what happens")
        found += [f"{row[0]}: {test} does not exist" for test in tests if test not in existing]
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "reliability.md").read_text("utf-8")


@pytest.mark.addon
def test_each_fault_names_existing_tests(page: str) -> None:
    tests = [test for row in rows(page) for test in named_tests(row)]
    assert problems(page, existing_tests(tests)) == []


@pytest.mark.addon
def test_each_boundary_of_trust_names_existing_tests() -> None:
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 10
    for line in lines:
        tests = named_tests((line,))
        assert tests, line
        assert set(tests) == existing_tests(tests), line


def test_page_is_linked() -> None:
    assert "(reliability.md)" in (ROOT / "docs" / "index.md").read_text("utf-8")


WRONG = """
| F01 | a | b | `tests/a.py::test_a` |
| F02 | a | b | |
| F03 | a | | `tests/b.py::test_b` |
| F03 | a | b | not here: no |
| F04 | a | b |
"""


def test_wrong_rows_are_reported() -> None:
    assert problems(WRONG, {"tests/a.py::test_a"}) == [
        "the rows are not F01 to F48, each once and in order",
        "F02 names no test and no reason",
        "F03 does not say what happens",
        "F03: tests/b.py::test_b does not exist",
        "F04: 3 cells, expected 4",
    ]


def test_only_tests_that_exist_are_found() -> None:
    own = f"{HERE}::test_only_tests_that_exist_are_found"
    method = "tests/end_to_end/test_stages.py::TestLosses::test_another_loss_in_another_stage"
    unknown = (f"{HERE}::test_that_does_not_exist", "tests/no_such_file.py::test_a")
    assert existing_tests([own, method, *unknown]) == {own, method}
    assert existing_tests(unknown[1:]) == set()
