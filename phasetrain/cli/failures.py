"""Errors on standard error, and in the file in which torchrun looks for the first cause."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phasetrain.errors import ConfigError, PeerError, PhasetrainError, list_problems

LAUNCHER_SECONDS = 0.3
"""How long a rank that fails because of another rank waits, so that torchrun, which polls every
0.1 s, sees the first cause first."""


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
