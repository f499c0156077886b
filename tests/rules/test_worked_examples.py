"""The worked examples of CONTRIBUTING.md are changes of this repository that work."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from test_docs import ROOT, blocks

Hunk = tuple[str, str]
"""Lines that a change replaces, and what replaces them."""

EXAMPLES = [
    block.text
    for block in blocks((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    if block.kind == "diff"
]

MAX_FILES = 4


def read_changes(diff: str) -> dict[str, list[Hunk]]:
    """Return file -> hunks. A file begins with `--- NAME`; `@@` is between two hunks."""
    changes = {}
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, text = part.partition("\n")
        hunks = [hunk.strip("\n").splitlines() for hunk in text.split("\n@@\n")]
        changes[name] = [(_select(hunk, " -"), _select(hunk, " +")) for hunk in hunks]
    return changes


def _select(hunk: Sequence[str], marks: str) -> str:
    return "".join(f"{line[1:]}\n" for line in hunk if line[0] in marks)


def list_misfits(changes: Mapping[str, Sequence[Hunk]], root: Path) -> list[str]:
    """Return a line for each hunk that does not fit exactly one place of its file."""
    misfits = []
    for name, hunks in changes.items():
        path = root / name
        for old, _ in hunks:
            places = f"\n{path.read_text('utf-8')}".count(f"\n{old}") if path.exists() else 0
            if path.exists() if not old else places != 1:
                misfits.append(f"{name}: {places} places for {old!r}")
    return misfits


def apply_changes(changes: Mapping[str, Sequence[Hunk]], root: Path) -> None:
    """Change the files of a tree; hunks must fit."""
    for name, hunks in changes.items():
        text = (root / name).read_text("utf-8") if (root / name).exists() else ""
        for old, new in hunks:
            text = f"\n{text}".replace(f"\n{old}", f"\n{new}", 1)[1:]
        (root / name).write_text(text, "utf-8")


def test_there_is_an_example_for_a_key_a_hook_and_a_command() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.addon("observe", "experiments")
@pytest.mark.parametrize("diff", EXAMPLES)
def test_example_fits_the_code_and_has_few_files(diff: str) -> None:
    changes = read_changes(diff)
    assert list_misfits(changes, ROOT) == []
    assert len(changes) <= MAX_FILES


def test_hunk_that_fits_nowhere_or_twice_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("one\ntwo\none\n")
    diff = "--- a.md\n one\n+new\n@@\n-two\n+2\n@@\n three\n\n--- b.md\n+new\n\n--- c.md\n old\n"
    changes = read_changes(diff)
    assert list_misfits(changes, tmp_path) == [
        "a.md: 2 places for 'one\\n'",
        "a.md: 0 places for 'three\\n'",
        "c.md: 0 places for 'old\\n'",
    ]
    apply_changes({"a.md": changes["a.md"][1:2], "b.md": changes["b.md"]}, tmp_path)
    assert (tmp_path / "a.md").read_text() == "one\n2\none\n"
    assert (tmp_path / "b.md").read_text() == "new\n"


def copy_repository(folder: Path) -> None:
    """Copy the files of the repository, changed ones as they are."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


@pytest.mark.slow
@pytest.mark.addon
@pytest.mark.timeout(900)
def test_examples_pass_their_tests_in_a_copy(tmp_path: Path) -> None:
    copy_repository(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    examples = [read_changes(diff) for diff in EXAMPLES]
    for changes in examples:
        assert list_misfits(changes, tmp_path) == []
        apply_changes(changes, tmp_path)
    written = sorted({name for changes in examples for name in changes})
    sources = [name for name in written if name.endswith(".py")]
    tests = [name for name in sources if name.startswith("tests/")]

    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run_python(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    run_python("-m", "ruff", "check", *sources)
    run_python("-m", "ruff", "format", "--check", *sources)
    # As `make reference` does.
    run_python("tools/docs_tables.py")
    page = run_python("-m", "phasetrain.addons.authoring.reference")
    (tmp_path / "docs" / "reference.md").write_text(page, "utf-8")
    generated = {
        path.relative_to(tmp_path).as_posix()
        for path, content in before.items()
        if path.read_bytes() != content
    } - set(written)
    assert generated == {
        "docs/addons/experiments.md",
        "docs/addons/observe.md",
        "docs/features.md",
        "docs/hooks.md",
        "docs/reference.md",
    }
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *tests)
