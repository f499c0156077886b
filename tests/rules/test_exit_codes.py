"""Each error a person may meet says with which exit code the run ends."""

import importlib
from pathlib import Path

from phasetrain.errors import PhasetrainError

ROOT = Path(__file__).parents[2]


def errors() -> list[type[PhasetrainError]]:
    """Return every error class of the package that ends a run with a message."""
    for path in sorted((ROOT / "phasetrain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] not in ("__init__", "__main__"):
            importlib.import_module(".".join(parts))
    found, waiting = [], [PhasetrainError]
    while waiting:
        error = waiting.pop()
        found.append(error)
        waiting += [
            below for below in error.__subclasses__() if below.__module__.startswith("phasetrain.")
        ]
    return found


def says_exit_code(error: type[PhasetrainError]) -> bool:
    """Tell whether the docstring has the exit code."""
    return f"exit code {error.exit_code})" in " ".join((error.__doc__ or "").split())


def test_errors_document_their_exit_code() -> None:
    assert [error.__qualname__ for error in errors() if not says_exit_code(error)] == []


def test_undocumented_exit_code_is_reported() -> None:
    class SilentError(PhasetrainError):
        """Something went wrong (exit code 1)."""

        exit_code = 9

    assert not says_exit_code(SilentError)
