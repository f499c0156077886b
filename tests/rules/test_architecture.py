"""docs/architecture.md names files that exist, and has all top-level modules."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
FILE = re.compile(r"`([\w/]+(?:\.py|/))`")


def missing_paths(page: str) -> list[str]:
    """Return the paths of a page that are neither files nor folders of the package."""
    return [path for path in FILE.findall(page) if not (ROOT / "phasetrain" / path).exists()]


@pytest.mark.addon
def test_all_files_of_the_page_exist() -> None:
    assert len(FILE.findall(PAGE)) > 40
    assert missing_paths(PAGE) == []


def test_a_missing_file_is_reported() -> None:
    assert missing_paths("see `engine/loop.py`, `engine/nothing.py` and `data/`") == [
        "engine/nothing.py"
    ]


def test_all_top_level_modules_are_in_the_diagram() -> None:
    diagram = PAGE.split("```")[1]
    names = {path.stem for path in (ROOT / "phasetrain").glob("[a-z]*")} - {"py"}
    assert {name for name in names if name not in diagram} == set()


def test_ways_through_the_code_are_short() -> None:
    limits = {"A config value": 14, "A batch": 9, "The run state": 7, "A metric": 10}
    for title, limit in limits.items():
        way = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
        assert len(re.findall(r"^\d+\. ", way, re.MULTILINE)) <= limit


def test_the_core_is_read_in_an_afternoon() -> None:
    part = PAGE.split("## The core in an afternoon\n")[1].split("\n## ")[0]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.MULTILINE)
    lines = [len((ROOT / "phasetrain" / file).read_text("utf-8").splitlines()) for file in files]
    assert len(files) == 10
    assert sum(lines) <= 3500
