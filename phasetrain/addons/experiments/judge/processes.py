"""The processes of the runs that are judged."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from phasetrain.addons.experiments.warm.start import SWITCH, start_process
from phasetrain.errors import PhasetrainError
from phasetrain.runtime.child_processes import (
    convert_exit_code,
    forward_signals,
    handle_signals,
)
from phasetrain.runtime.signals import SignalExit


@dataclass(frozen=True)
class WorkingFolder:
    """Where the runs of a contender are made.

    Attributes:
        path: the working directory.
        search_path: value of PYTHONPATH, if it is not empty.
    """

    path: str = "."
    search_path: tuple[str, ...] = ()


class StoppedError(PhasetrainError):
    """A signal has ended the command, and re-running it resumes.

    The process exits with 128 + n after signal n (without a signal: exit code 1).

    Args:
        number: number of the signal.
    """

    default_code = "judge.stopped"

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}; re-run the command to resume")
        self.exit_code = 128 + number


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let a signal that asks to stop end the block as an exception does, so that it cleans up.

    Raises:
        StoppedError: a signal came.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # Not StoppedError, which an `except` on the way might take for an error of a run.
        received.append(number)
        raise SignalExit(128 + number)

    try:
        with handle_signals(stop):
            yield
    except SignalExit as error:
        if not received:
            raise
        raise StoppedError(received[0]) from error


@contextmanager
def delay_signals() -> Iterator[None]:
    """Keep signals that ask to stop until a block that must not be interrupted has ended.

    Raises:
        StoppedError: a signal came.
    """
    with forward_signals([]) as received:
        yield
    if received:
        raise StoppedError(received[0])


class Launch(Protocol):
    """Runs a module in a separate process, and returns the exit code."""

    def __call__(self, words: Sequence[str], working_folder: WorkingFolder, output: Path) -> int:
        """Run `python -m WORDS` in a folder, and append its output to a file."""


def launch_process(
    words: Sequence[str],
    working_folder: WorkingFolder,
    output: Path,
    *,
    group: str = "",
    is_warm: bool = True,
) -> int:
    """Run a module in a new process, and return the exit code.

    Args:
        words: the module, and its command line.
        working_folder: where it runs.
        output: file to which its output is appended.
        group: runs of one group have the same seed of Python's hashes; by default those of one
            contender.
        is_warm: whether a warm parent may fork it, which stays until this process ends.

    Raises:
        StoppedError: a signal came; it was forwarded, and the process has ended.
    """
    environment = dict(os.environ)
    # As in the installed command, the working directory is searched last (see `run_imports`).
    environment["PYTHONSAFEPATH"] = "1"
    if not is_warm:
        environment[SWITCH] = "0"
    if working_folder.search_path:
        environment["PYTHONPATH"] = os.pathsep.join(working_folder.search_path)
    with output.open("ab") as file:
        process = start_process(
            [sys.executable, "-m", *words],
            environment,
            cwd=working_folder.path,
            stdin=subprocess.DEVNULL,  # a `breakpoint()` in a run must not wait for the terminal
            output=file,
            # Bits that depend on the seed of Python's hashes must not look identical.
            group=group or str(output.parent),
        )
        with forward_signals([process]) as received:
            code = process.wait()
    # After the wait: the run has saved its checkpoint by now.
    if received:
        raise StoppedError(received[0])
    return convert_exit_code(code)
