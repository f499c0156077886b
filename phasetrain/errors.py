"""Errors that a user has to act on, each with a stable code and the exit code of the process.

Every message is a sentence with the `SECTION.key`, the value in the config, the expected value, and
a fix. Programs and tests read `code` and `problems` instead of the sentence.
"""

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from types import CodeType, MappingProxyType
from typing import ClassVar

_KEY_AND_VALUE = re.compile(
    r"(?P<key>[A-Z][A-Z_]*(?:\.[\w*@-]+|\[\d+\])*)"  # SECTION.key
    r"(?: = (?P<given>.+?))?(?: \([^()]*\))?: "  # = value (layer that set it)
    r"(?P<rest>.*)",
    re.DOTALL,
)
_SUGGESTION = re.compile(r"did you mean (?P<suggestion>[^?]+)\?")

EXIT_CODES: Mapping[int, str] = MappingProxyType(
    {
        0: "success, or the run had already finished",
        1: "any other error",
        2: "error in the config or in the command line",
        3: "the data, the plan or a forbidden key has changed since the checkpoint",
        4: "another process uses the run folder",
        5: "there are checkpoints, but none is valid",
        6: "repeated attempts made no progress",
        7: "a resumed run is not bit-identical, or the machine is not the certified one",
        8: "a repeated update has another result, or a candidate is worse",
        9: "undecided: not everything could be compared",
    }
)
"""Exit code -> its meaning; a process that a signal n ends has 128 + n."""

SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)
"""Types that torch and custom code raise for wrong shapes, dtypes and values."""

SHOWN_FRAMES = 3
"""Maximum number of frames of user code below an error."""

LONGEST_LINE = 100  # characters of a line of code below an error

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_STANDARD_LIBRARY = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@dataclass(frozen=True)
class Problem:
    """One mistake, as programs read it.

    Attributes:
        code: stable identifier such as `config.unknown_key`.
        message: the sentence for people.
        key: `SECTION.key` that the sentence is about, or empty.
        given: the value that was given, as written in YAML, or empty.
        expected: the expected value, or empty if the message names no key.
        suggestion: the key or value that was probably meant, or empty.
        frames: the innermost lines of user code that led to it, see `list_user_frames`.
    """

    code: str
    message: str
    key: str = ""
    given: str = ""
    expected: str = ""
    suggestion: str = ""
    frames: tuple[str, ...] = ()

    @classmethod
    def from_message(
        cls, message: str, code: str, key: str = "", frames: tuple[str, ...] = ()
    ) -> "Problem":
        """Parse a message of the form `SECTION.key = value: sentence`, or one about a given key."""
        match = _KEY_AND_VALUE.match(message)
        near = _SUGGESTION.search(message)
        return cls(
            code=code,
            message=message,
            key=key or (match["key"] if match else ""),
            given=(match["given"] or "") if match else "",
            expected=match["rest"] if match else "",
            suggestion=near["suggestion"].strip("'") if near else "",
            frames=frames,
        )


class PhasetrainError(Exception):
    """Base of all errors that end a run with a message instead of a traceback (exit code 1).

    Args:
        message: a sentence of the form `SECTION.key = value: expected ...; fix`.
        code: stable identifier of the kind of mistake; the default is the code of the class.
        problems: the mistakes, if the error reports several.
    """

    exit_code = 1
    default_code: ClassVar[str] = "error"

    def __init__(
        self, message: str = "", *, code: str | None = None, problems: Iterable[Problem] = ()
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.problems = tuple(problems)
        if not self.problems:
            # Now, and not when the error is printed: its cause is lost when it is sent to another
            # process, or collected with other mistakes.
            frames = list_user_frames(sys.exception())
            self.problems = (Problem.from_message(message, self.code, frames=frames),)

    @property
    def key(self) -> str:
        """The `SECTION.key` of the first problem, or empty."""
        return self.problems[0].key

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback: the message, and the lines of
        user code that led to it."""
        lines = [f"{type(self).__name__}: {self}", *vars(self).get("__notes__", ())]
        for problem in list_problems(self):
            lines += [f"    {frame}" for frame in problem.frames]
        return lines


class ConfigError(PhasetrainError, ValueError):
    """The config, a part it refers to, or the command line is invalid (exit code 2)."""

    exit_code = 2
    default_code = "config.invalid"


class ChangedError(PhasetrainError):
    """The data, the plan or a forbidden key differs from the checkpoint (exit code 3)."""

    exit_code = 3
    default_code = "resume.changed"


class FolderInUseError(PhasetrainError):
    """Another process owns the run folder (exit code 4)."""

    exit_code = 4
    default_code = "folder.in_use"


class NoValidCheckpointError(PhasetrainError):
    """Checkpoints exist, and none of them is valid (exit code 5)."""

    exit_code = 5
    default_code = "checkpoint.none_valid"


class NoProgressError(PhasetrainError):
    """Several attempts in a row have ended without a new checkpoint (exit code 6)."""

    exit_code = 6
    default_code = "run.no_progress"


class CorruptionError(PhasetrainError):
    """An update has another result when it is repeated: memory or a device is faulty (exit
    code 8)."""

    exit_code = 8
    default_code = "recheck.mismatch"


class SaveError(PhasetrainError):
    """A checkpoint could not be written; earlier ones are not touched (exit code 1)."""

    default_code = "checkpoint.save_failed"


class InvalidCheckpointError(PhasetrainError):
    """A checkpoint is truncated, altered or of an unknown format; an earlier one may be valid
    (exit code 1)."""

    default_code = "checkpoint.invalid"


class NumericsError(PhasetrainError):
    """A loss or a gradient is not finite, and the config does not allow skipping (exit code 1)."""

    default_code = "numerics.nonfinite"


class ExitCallError(PhasetrainError):
    """User code has called `sys.exit` or raised KeyboardInterrupt in a run, which has not finished
    (exit code 1)."""

    default_code = "run.exit_called"

    @classmethod
    def from_exit(cls, error: BaseException) -> "ExitCallError":
        """Return the error for an exit or an interrupt that is being handled."""
        call = repr(error).replace("SystemExit", "sys.exit")
        frames = list_user_frames(error)
        location = frames[-1].partition(" in ")[0] if frames else "a library"
        return cls(
            f"{location}: {call} before the run has finished; raise an exception that "
            'says what is wrong, or end the run with run.stop("why") in a hook'
        )


class OrderError(PhasetrainError):
    """The ranks of a run do not make the same collective calls in the same order (exit code 1)."""

    default_code = "distributed.collective_order"


class LaunchError(PhasetrainError):
    """The cluster did not accept the job (exit code 1)."""

    default_code = "launch.failed"


class PeerError(PhasetrainError):
    """Another rank of the run has failed; this one ends with that rank's exit code, or, if the
    rank left none, with 1 (exit code 1).

    Args:
        reason: which rank, and why.
        exit_code: exit code of the process that failed first.
        code: as for `PhasetrainError`.
        ranks: the ranks that have failed or are lost.
    """

    default_code = "distributed.peer_failed"

    def __init__(
        self,
        reason: str,
        exit_code: int = 1,
        *,
        code: str | None = None,
        ranks: Iterable[int] = (),
    ) -> None:
        super().__init__(reason, code=code)
        self.exit_code = exit_code
        self.ranks = tuple(ranks)


def is_user_file(path: str) -> bool:
    """Check whether a file holds code of the user, which an error should point at.

    All files are the user's, except for the files of phasetrain, of Python's standard library, and
    of packages below `site-packages` or `dist-packages`, such as torch. Generated code, such as
    `<string>`, has no file; cells of a notebook have one.
    """
    if path.startswith((_PACKAGE, *_STANDARD_LIBRARY)) or any(
        installed in path for installed in _INSTALLED
    ):
        return False
    return not path.startswith("<") or bool(linecache.getlines(path))


def list_user_frames(error: BaseException | None) -> tuple[str, ...]:
    """Return the innermost calls in the user's files that led to an error, the last one innermost.

    Of an error and its causes, the first one that was raised below user code counts. Callers of
    phasetrain, such as a script that starts the run, are left out.

    Returns:
        At most `SHOWN_FRAMES` lines such as `bad.py:10 in BadForward.forward: return self.b(h)`.
    """
    for cause in _walk_causes(error):
        calls = [(frame.f_code, line) for frame, line in walk_tb(cause.__traceback__)]
        ours = [at for at, (code, _) in enumerate(calls) if code.co_filename.startswith(_PACKAGE)]
        below = calls[ours[0] if ours else 0 :]
        frames = [_format_call(*call) for call in below if is_user_file(call[0].co_filename)]
        if frames:
            return tuple(frames[-SHOWN_FRAMES:])
    return ()


def list_problems(error: BaseException) -> tuple[Problem, ...]:
    """Return the mistakes that an error reports, one for an error of another type.

    Each has the lines of user code that led to it.
    """
    if isinstance(error, PhasetrainError):
        problems = error.problems
    else:
        problems = (Problem("internal", f"{type(error).__name__}: {error}"),)
    if any(problem.frames for problem in problems):
        return problems
    # No problem was made from another error: the error itself may have been raised by user code.
    return (replace(problems[0], frames=list_user_frames(error)), *problems[1:])


def needs_traceback(error: BaseException) -> bool:
    """Check whether the message of an error may not be enough to find its cause: some other code
    than phasetrain has raised it, or has called phasetrain."""
    is_sentence = all(isinstance(cause, PhasetrainError) for cause in _walk_causes(error))
    return not is_sentence or bool(list_user_frames(error))


def _walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on, as a traceback prints them."""
    while error is not None:
        yield error
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)


def _format_call(code: CodeType, line: int) -> str:
    path = Path(code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    text = linecache.getline(code.co_filename, line).strip()[:LONGEST_LINE]
    return f"{path}:{line} in {code.co_qualname}: {text}".rstrip(": ")


_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",  # torch's allocator of the CPU
    "cannot allocate memory",  # ENOMEM of the operating system
    "not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error reports that memory is exhausted.

    `torch.OutOfMemoryError` exists for some devices only; the CPU allocator raises a plain
    RuntimeError, so the text decides.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in text for phrase in _OUT_OF_MEMORY)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest of `known`, or an empty string when nothing is
    near."""
    names = list(known)
    near = nearest(given, names) or _complete(given, names)
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
    matches = get_close_matches(plain(given), entries, n=1, cutoff=likeness)
    if matches:
        return entries[matches[0]]
    return None


def _complete(given: str, known: Iterable[str]) -> str | None:
    """Return the only entry of `known` that an abbreviation of three or more letters begins."""
    matches = [name for name in known if plain(name).startswith(plain(given))]
    if len(plain(given)) >= 3 and len(matches) == 1:
        return matches[0]
    return None


def plain(name: str) -> str:
    """Return a name without case and separators, as near misses are compared."""
    return name.lower().replace("_", "").replace("-", "")
