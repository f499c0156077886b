"""The errors a person has to act on, each with the exit code that scripts see.

Every message is a sentence with the `SECTION.key`, what was given, what is expected and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PhasetrainError(Exception):
    """Base of all errors that end a run with a message instead of a traceback (exit code 1)."""

    exit_code = 1


class ConfigError(PhasetrainError, ValueError):
    """The config, a part named by it, or the command line cannot be used (exit code 2)."""

    exit_code = 2


class ChangedError(PhasetrainError):
    """Data, plan or a forbidden key is no longer what the checkpoint was made with (exit code
    3)."""

    exit_code = 3


class FolderInUseError(PhasetrainError):
    """Another process owns the run folder (exit code 4)."""

    exit_code = 4


class NoValidCheckpointError(PhasetrainError):
    """Checkpoints exist and not one of them can be read (exit code 5)."""

    exit_code = 5


class NoProgressError(PhasetrainError):
    """Several attempts in a row have ended without a new checkpoint (exit code 6)."""

    exit_code = 6


class SaveError(PhasetrainError):
    """A checkpoint could not be written; those before it are untouched (exit code 1)."""


class InvalidCheckpointError(PhasetrainError):
    """One checkpoint is torn, altered or of an unknown format; the one before it may still serve
    (exit code 1)."""


class NumericsError(PhasetrainError):
    """A loss or a gradient is not finite, and the run must not go on with it (exit code 1)."""


class OrderError(PhasetrainError):
    """The processes of a run do not make the same collective calls in the same order (exit code
    1)."""


class LaunchError(PhasetrainError):
    """The cluster did not take the job (exit code 1)."""


class PeerError(PhasetrainError):
    """Another process of the run has failed; this one ends with the code of that one, or without
    one (exit code 1).

    Args:
        reason: which process, and why.
        exit_code: of that process.
    """

    exit_code = 1

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest of `known`, or an empty string when nothing is
    near."""
    near = nearest(given, known)
    if near:
        return f"; did you mean {near!r}?"
    return ""


def nearest(given: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the entry of `known` most like `given`, compared without case and separators, or None.

    Args:
        likeness: least ratio of matching characters, in (0, 1]; of equally near entries the first
            one is taken.
    """
    entries: dict[str, str] = {}
    for name in known:
        entries.setdefault(plain(name), name)
    found = get_close_matches(plain(given), entries, n=1, cutoff=likeness)
    if found:
        return entries[found[0]]
    return None


def plain(name: str) -> str:
    """Return a name without case and separators, as near misses are compared."""
    return name.lower().replace("_", "").replace("-", "")
