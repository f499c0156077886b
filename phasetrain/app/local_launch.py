"""Several ranks on this machine without a cluster: LAUNCH.processes.

torchrun would do this too, but it answers Ctrl-C with a second signal, a traceback and a kill after
30 seconds, and always exits with 1.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from phasetrain.config.addons import find_service, require_service
from phasetrain.runtime.child_processes import (
    COMMAND,
    convert_exit_code,
    forward_signals,
    make_rank_environment,
    send_signal,
    stop_with_parent,
)
from phasetrain.runtime.signals import SAVING

POLL_SECONDS = 0.02
"""Interval at which the processes are looked at."""

PATIENCE_SECONDS = 60.0
"""Time that the other ranks have to end after one has failed; then they are killed."""


Watch = Callable[[Sequence["subprocess.Popen[bytes]"], Sequence[int]], None]
"""Called again and again with the processes of a run, which it may end, and with the numbers of the
signals that were passed on to them."""


def start_ranks(config: Mapping[str, Any], words: Sequence[str]) -> int:
    """Run a command line on the ranks that a config asks for, under a supervisor where LAUNCH says
    so, and return the exit code.

    Raises:
        ConfigError: LAUNCH.supervise is set, and its add-on is not installed, or rejects it.
    """
    launch = config["LAUNCH"]
    supervise = find_service("supervise")
    if launch["supervise"]:
        where = f"LAUNCH.supervise = {launch['supervise']!r}:"
        supervise = require_service("supervise", "observe", where)
    if launch["supervise"] is False or supervise is None:
        return launch_processes(launch["processes"], words)
    code: int = supervise(config, words)
    return code


def launch_processes(
    size: int,
    words: Sequence[str],
    command: Sequence[str] = COMMAND,
    *,
    output: IO[bytes] | None = None,
    watch: Watch | None = None,
) -> int:
    """Run a command line on several ranks, pass signals on to them, and return the exit code.

    Args:
        size: number of ranks; one is started as if this process were it, without a world.
        words: the command line, without the program.
        command: starts the program.
        output: file for all output; the ranks are then a separate process group, which one of
            them may kill.
        watch: called until all ranks have ended.

    Returns:
        0 if all ranks have succeeded, else the exit code of the rank that failed first, 128 + n for
        a rank that signal n has killed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    group: int | None = None
    with forward_signals(processes, SAVING, is_apart=output is not None) as received:
        for environment in _list_environments(size, os.environ):
            line = [*command, *words]
            if output is not None:
                group = processes[0].pid if processes else 0
            processes.append(
                subprocess.Popen(
                    line,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    process_group=group,
                    preexec_fn=stop_with_parent,
                )
            )
        return _wait(processes, received, watch)


def _wait(
    processes: Sequence["subprocess.Popen[bytes]"], received: Sequence[int], watch: Watch | None
) -> int:
    """Return the first exit code that is not 0, or 0, once all processes have ended."""
    failure = 0
    failed_at = 0.0
    while True:
        codes = [process.poll() for process in processes]
        ended = [code for code in codes if code]
        if ended and not failure:
            failure = ended[0]
            failed_at = time.monotonic()
        if None not in codes:
            return convert_exit_code(failure)
        if failure and time.monotonic() - failed_at > PATIENCE_SECONDS:
            send_signal(processes, signal.SIGKILL)
        if watch is not None:
            watch(processes, received)
        # Not Popen.wait: a signal is then passed on although another thread has received it.
        time.sleep(POLL_SECONDS)


def _list_environments(size: int, inherited: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment of each rank."""
    if size == 1:
        return [dict(inherited)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**inherited, "LOCAL_WORLD_SIZE": str(size)}
    return [
        make_rank_environment(
            shared, rank=rank, size=size, local_rank=rank, nodes=1, address="127.0.0.1", port=port
        )
        for rank in range(size)
    ]
