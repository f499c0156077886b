"""Parses the command line, runs the command and prints its outcome."""

import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path

from phasetrain.cli.output import (
    Outcome,
    stdout_to_stderr,
    write_json,
    write_json_error,
    write_text,
)
from phasetrain.cli.parsing import Call, make_parser, own_words, parse_flags, split_command
from phasetrain.cli.table import list_commands, list_group
from phasetrain.config.addons import Command, import_object
from phasetrain.errors import ConfigError, PeerError, PhasetrainError, list_problems
from phasetrain.runs.owner import process_age
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.signals import reject_exit

log = getLogger(__name__)

LAUNCHER_SECONDS = 0.3
"""How long a rank that fails because of another rank waits, so that torchrun, which polls every
0.1 s, sees the first cause first."""


def console() -> None:
    """Run the command line of this process and exit."""
    clock = Clock(time.perf_counter() - process_age())
    sys.exit(main(clock=clock, owns_process=True))


def main(
    argv: Sequence[str] | None = None, *, clock: Clock | None = None, owns_process: bool = False
) -> int:
    """Run a command line and return the exit code; errors are printed without a traceback.

    Args:
        argv: words of the command line; by default the words of this process.
        clock: measures the attempt; by default it starts with the run.
        owns_process: whether the process ends with this call.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Not from the parsed flags: a command line that cannot be parsed is reported as JSON as well.
    is_json = "--json" in own_words(words)
    redirection: AbstractContextManager[None] = nullcontext()
    if is_json:
        redirection = stdout_to_stderr()
    with redirection:
        ended = _execute(words, clock, owns_process=owns_process)
    # printed after the redirection, so that it is the only text on standard output
    outcome = ended.outcome
    if not is_json:
        write_text(outcome.text)
    elif outcome.is_main and ended.failure is None:
        write_json(ended.command, outcome)
    elif outcome.is_main and ended.failure is not None:
        write_json_error(ended.command, ended.failure, outcome.exit_code)
    if ended.failure is not None and not ended.is_reported:
        raise ended.failure
    return outcome.exit_code


@dataclass
class _Ended:
    """How a command ended.

    Attributes:
        command: its name; empty if the command line could not be parsed.
        outcome: the output, and the exit code.
        failure: the error that ended it.
        is_reported: whether the failure was printed, so that no traceback is needed.
    """

    command: str = ""
    outcome: Outcome = field(default_factory=Outcome)
    failure: BaseException | None = None
    is_reported: bool = True


def _execute(words: Sequence[str], clock: Clock | None, *, owns_process: bool) -> _Ended:
    ended = _Ended()
    runs_user_code = False
    try:
        if "--version" in own_words(words):
            ended.outcome = _version()
            return ended
        command, rest = split_command(list_commands(), _help_as_command(words))
        ended.command = command.name
        runs_user_code = command.takes_overrides
        flags = parse_flags(command, rest)
        call = Call(command.name, flags, clock, tuple(words), owns_process)
        with reject_exit():
            ended.outcome = _run(command, call)
    except PhasetrainError as error:
        text = format_error(error, os.environ)
        sys.stderr.write(text)
        record_failure(error)
        # a rank that leaves the message to another rank leaves the JSON object to it as well
        ended.outcome = Outcome(error.exit_code, is_main=bool(text))
        ended.failure = error
    except KeyboardInterrupt as error:
        ended.outcome = Outcome(130)  # 128 + SIGINT, as a shell reports it
        ended.failure = error
    except SystemExit as error:  # stopped by a signal
        code = error.code if isinstance(error.code, int) else 1
        ended = _Ended(ended.command, Outcome(code), error, is_reported=False)
    except Exception as error:  # noqa: BLE001 - raised again, once the JSON object is printed
        record_failure(error)  # with the traceback, which torchrun shows as well
        # An error in user code is shown by the lines there. Without any, it is a defect of
        # phasetrain, and its traceback is needed.
        frames = [problem.frames for problem in list_problems(error)]
        is_reported = runs_user_code and any(frames)
        if is_reported:
            sys.stderr.write(format_error(error, os.environ))
        ended = _Ended(ended.command, Outcome(1), error, is_reported=is_reported)
    return ended


def _run(command: Command, call: Call) -> Outcome:
    if call.flags.help:
        text = make_parser(command).format_help().rstrip()
        return Outcome(text=text, content={"text": text})
    if not command.takes_overrides:
        return _call(command, call)
    # Composing a config is slow to import, and the commands on files do not need it.
    from phasetrain.cli.train_commands import print_config

    if call.flags.cfg:
        return print_config(command, call)
    with log_warnings():
        return _call(command, call)


def _call(command: Command, call: Call) -> Outcome:
    outcome: Outcome = import_object(command.run)(call)
    return outcome


def _help_as_command(words: Sequence[str]) -> list[str]:
    """Return `--help [SECTION]`, in front of everything else, as `help [SECTION]`, and a `GROUP`
    without a command as `help GROUP`."""
    rest = list(words)
    plain = [word for word in rest if word not in ("-h", "--help", "--json")]
    if len(plain) == 1 and list_group(plain[0]):
        rest = [word for word in rest if word not in ("-h", "--help")]
        return ["help", *rest]
    first = next((word for word in rest if word != "--json"), "")
    if first in ("-h", "--help"):
        rest[rest.index(first)] = "help"
    return rest


def _version() -> Outcome:
    from phasetrain import __version__

    return Outcome(text=f"phasetrain {__version__}", content={"version": __version__})


@contextmanager
def log_warnings() -> Iterator[None]:
    """Log the warnings of libraries, so that they are counted and written to log.txt."""

    def log_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: object,
        **__: object,
    ) -> None:
        log.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)

    with warnings.catch_warnings():
        warnings.showwarning = log_warning
        yield


def format_error(error: Exception, environment: Mapping[str, str]) -> str:
    """Return the text that this rank prints for an error, or an empty text.

    Below the message are the innermost lines of user code that led to it, if any. A failure of
    another rank is reported by rank 0 alone; by rank 1 if rank 0 is the one that is gone or hangs.
    """
    rank, size = _rank_and_size(environment)
    if isinstance(error, PeerError) and rank:
        is_rank_0_lost = error.code != PeerError.default_code and 0 in error.ranks
        if rank != 1 or not is_rank_0_lost:
            return ""
    message = str(error)
    if not isinstance(error, PhasetrainError):
        message = f"{type(error).__name__}: {error}".rstrip(": ")
    text = "\n".join((message, *vars(error).get("__notes__", ()), *_format_frames(error)))
    if rank:
        return f"rank {rank} of {size}: {text}\n"
    return f"{text}\n"


def _format_frames(error: Exception) -> list[str]:
    """Return indented lines of user code, under the number of the mistake if there are several."""
    lines = list[str]()
    problems = list_problems(error)
    for number, problem in enumerate(problems, 1):
        if problem.frames and len(problems) > 1:
            lines.append(f"  {number}. at")
        lines += [f"    {frame}" for frame in problem.frames]
    if lines:
        log_file = vars(error).get("log_file", "")
        where = f"in {log_file}" if log_file else "with -v"
        lines.append(f"    (whole traceback: {where})")
    return lines


def _rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    if not {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"} & environment.keys():
        # One process. find_placement() would return the same, but importing it imports torch: a
        # second more before a typing error is reported.
        return 0, 1
    from phasetrain.distributed import find_placement

    try:
        placement = find_placement(environment)
    except ConfigError:
        return 0, 1  # a broken variable of the launcher may be the error to print
    return placement.rank, placement.size


def record_failure(error: BaseException) -> None:
    """Write an error into the file that torchrun reads, TORCHELASTIC_ERROR_FILE.

    The file appears as a whole: torchrun reads it while it ends this process, and fails over half
    a file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    part = f"{path}.part"
    os.environ["TORCHELASTIC_ERROR_FILE"] = part  # the handler takes no path
    try:
        handler.initialize()
        handler.record_exception(error)
        # A full disk must not replace the error to report with its own.
        with suppress(OSError):
            Path(part).replace(path)
    finally:
        os.environ["TORCHELASTIC_ERROR_FILE"] = path
    if isinstance(error, PeerError):
        time.sleep(LAUNCHER_SECONDS)
