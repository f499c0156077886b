"""docs/features.md tells the truth: each row once, and every test that it names exists and is
collected."""

import re
import subprocess
import sys
from collections.abc import Collection, Iterable
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
        if not re.fullmatch(r"B?\d+|\d+-\d+", row[0]):
            found.append(f"row {row[0]!r}: expected a number or a range, such as 14, 29-33 or B1")
        if not named_tests(row):
            found.append(f"row {row[0]} names no test")
        found += [
            f"row {row[0]}: {test} is not collected"
            for test in named_tests(row)
            if test not in collected
        ]
    return found


def existing(tests: Iterable[str], here: Collection[str]) -> set[str]:
    """Return which of the tests exist.

    Args:
        here: tests that are known to exist, such as those of this session; the files of others are
            collected anew.
    """
    tests = set(tests)
    missing = tests - set(here)
    return tests & {
        *here,
        *(collected(test.partition("::")[0] for test in missing) if missing else ()),
    }


def collected(files: Iterable[str]) -> set[str]:
    """Return the tests that pytest finds in files, slow ones included; none in a file that does not
    exist."""
    existing = [file for file in sorted(set(files)) if (ROOT / file).is_file()]
    if not existing:  # pytest would collect them all
        return set()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        *existing,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "features.md").read_text("utf-8")


@pytest.fixture(scope="module")
def found(page: str, collected_here: frozenset[str]) -> set[str]:
    return existing(_TEST.findall(page), collected_here)


def test_the_page_is_true(page: str, found: set[str]) -> None:
    assert rows(page)
    assert problems(page, found) == []


def test_what_stands_beyond_the_table_is_true_too(page: str, found: set[str]) -> None:
    beyond = page.partition("## Beyond")[2]
    assert len(_TEST.findall(beyond)) >= 10
    assert [test for test in _TEST.findall(beyond) if test not in found] == []


def numbers(row: str) -> set[str]:
    """Return the numbers that a row or a range of rows stands for."""
    first, dash, last = row.partition("-")
    return {str(n) for n in range(int(first), int(last) + 1)} if dash else {row}


def test_every_row_of_the_feature_table_is_proved(page: str) -> None:
    proved = set().union(*(numbers(row[0]) for row in rows(page)))
    assert proved == {str(n) for n in range(1, 114)} | {f"B{n}" for n in range(1, 13)}


@pytest.mark.slow
def test_what_does_not_exist_is_not_collected() -> None:
    slow, other = (
        f"{HERE}::test_what_does_not_exist_is_not_collected",
        f"{HERE}::test_rows_stand_in_order",
    )
    unknown = (f"{HERE}::test_that_does_not_exist", "tests/no_such_file.py::test_a")
    assert existing([slow, other, *unknown], [other]) == {slow, other}
    assert existing(unknown[1:], []) == set()


def test_what_this_session_has_collected_is_not_collected_again(
    collected_here: frozenset[str],
) -> None:
    mine = f"{HERE}::test_what_does_not_exist_is_not_collected"  # deselected, mostly
    assert existing([mine], collected_here) == {mine}


def test_rows_stand_in_order(page: str) -> None:
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


def test_what_is_wrong_is_seen() -> None:
    assert problems(WRONG, {"tests/a.py::test_a"}) == [
        "row 1 stands there twice",
        "row 1: tests/a.py::test_b is not collected",
        "row 'x': expected a number or a range, such as 14, 29-33 or B1",
        "row x names no test",
        "4 | d | `tests/a.py::test_a`: 3 cells, expected 4",
    ]
