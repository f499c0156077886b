"""docs/architecture.md names files that exist, and has all top-level modules."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
FILE = re.compile(r"`([\w/]+(?:\.py|/))`")

SYMPTOMS = {
    "Wrong learning rate": {"schedule"},
    "Wrong order, repeated or missing samples": {"position", "samples"},
    "Wrong metric": {"meters", "metrics"},
}
"""Title of a list of files -> kinds of bugs in benchmarks/planted_bugs.json with this symptom."""


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


def find_unlisted_bugs(bugs: Iterable[Mapping[str, str]], page: str) -> list[str]:
    """Return the names of planted bugs in files of the core that their list does not name."""
    unlisted = []
    for title, kinds in SYMPTOMS.items():
        part = page.split(f"### {title}\n")[1].split("\n#")[0]
        files = {f"phasetrain/{path}" for path in FILE.findall(part)}
        unlisted += [
            bug["name"]
            for bug in bugs
            if bug["name"].partition(":")[0] in kinds
            and not bug["module"].startswith("phasetrain/addons/")
            and bug["module"] not in files
        ]
    return unlisted


def test_planted_bugs_are_in_files_of_their_symptom() -> None:
    bugs = json.loads((ROOT / "benchmarks" / "planted_bugs.json").read_text("utf-8"))
    assert find_unlisted_bugs(bugs, PAGE) == []
    moved = {"name": "position: it is lost", "module": "phasetrain/models/freeze.py"}
    assert find_unlisted_bugs([moved], PAGE) == ["position: it is lost"]
