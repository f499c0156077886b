"""The files speak of the project alone: no path of the machine that they were written on, no host
of packages."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {"LICENSE", "tests/rules/test_words.py"}

FORBIDDEN = (
    r"/work/",
    r"/root/",
    r"/opt/(wheels|pypi)",
    r"\bpypi\.",
    r"pythonhosted",
    r"\bclaude\b",
    r"\banthropic\b",
    r"\bLLMs?\b",
    r"\bagents?\b",
)
_FOUND = re.compile("|".join(FORBIDDEN), re.IGNORECASE)


def tracked() -> list[str]:
    """Return the paths of all files under version control, and of new ones that are not ignored."""
    command = [
        "git",
        "-c",
        f"safe.directory={ROOT}",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return sorted(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file())


def forbidden(text: str) -> list[str]:
    """Return `line: word` for each forbidden word."""
    return [
        f"{number}: {match[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in _FOUND.finditer(line)
    ]


def test_no_forbidden_words() -> None:
    found = []
    for name in tracked():
        content = (ROOT / name).read_bytes()
        if name not in SKIPPED and b"\0" not in content:
            found += [f"{name}:{line}" for line in forbidden(content.decode("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\nsee /work/main for it", ["2: /work/"]),
        ("https://PyPI.org/simple", ["1: PyPI."]),
        ("an LLM", ["1: LLM"]),
        ("a magenta network, pypi in words", []),
    ],
)
def test_forbidden_words_are_seen(text: str, found: list[str]) -> None:
    assert forbidden(text) == found
