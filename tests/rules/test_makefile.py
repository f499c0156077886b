"""`make test` runs the tests of core and add-ons as two jobs, and fails if one of them does."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
    *--ignore=tests/addons*) $CORE ;;
    *) $REST ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def run_make(folder: Path, options: str, core: str, rest: str) -> tuple[int, int]:
    """Run `make test` with a script instead of Python, and return its exit code and its calls."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name in ("core", "full"):
        (folder / name).touch()
    calls = folder / "calls"
    done = subprocess.run(
        ["make", "test", f"VENV={folder}", f"ARGS={options}"],
        cwd=ROOT,
        env={**os.environ, "CALLS": str(calls), "CORE": core, "REST": rest, "MAKEFLAGS": ""},
        capture_output=True,
        start_new_session=True,
    )
    return done.returncode, len(calls.read_text().splitlines())


@pytest.mark.parametrize(
    ("options", "core", "rest", "expected"),
    [
        ("", "exit 0", "exit 0", (0, 2)),
        ("", "exit 1", "exit 0", (2, 2)),
        ("", "exit 0", "exit 1", (2, 2)),
        # pytest ends with 5 if it has selected no test.
        ("-k 'a or b'", "exit 5", "exit 0", (0, 2)),
        ("-k 'a or b'", "exit 0", "exit 5", (0, 2)),
        ("-k 'a or b'", "exit 1", "exit 5", (2, 2)),
        ("-k 'a or b'", "exit 5", "exit 5", (2, 2)),
        ("-k 'a or b'", "exit 5", "exit 1", (2, 2)),
        ("tests", "exit 1", "exit 0", (0, 1)),
        ("tests/config -x", "exit 0", "exit 1", (2, 1)),
        ("tests/config -x", "exit 0", "exit 5", (2, 1)),
    ],
)
def test_exit_code_is_that_of_the_jobs_that_have_tests(
    tmp_path: Path, options: str, core: str, rest: str, expected: tuple[int, int]
) -> None:
    assert run_make(tmp_path, options, core, rest) == expected


def test_second_job_does_not_start_after_an_interrupt(tmp_path: Path) -> None:
    interrupt = f"kill -{signal.SIGINT} 0"  # the whole process group, as Ctrl-C does
    code, calls = run_make(tmp_path, "", f"eval trap : INT; {interrupt}; exit 2", "exit 0")
    assert (code != 0, calls) == (True, 1)
