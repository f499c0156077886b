"""The warm parent: it imports everything that a run needs, and forks a child per run.

    python -m phasetrain.addons.experiments.warm.parent DESCRIPTOR PID

DESCRIPTOR is its end of a socket. PID is the process that has started it; the parent ends when that
process does. It executes no operation of torch, starts no thread, draws no random number and
imports no file of the user, so that a child differs from a new process in its imports alone.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from phasetrain.errors import is_user_file
from phasetrain.runtime.child_processes import stop_with_parent

IMPORTED = (
    "phasetrain.app.engines",
    "phasetrain.app.local_launch",
    "phasetrain.cli.main",
    "phasetrain.cli.train_commands",
    "phasetrain.distributed.strategies.ddp",
    "phasetrain.data.datasets.digits",
    "phasetrain.data.transforms.joint.geometric",
    "phasetrain.data.transforms.joint.pipeline",
    "phasetrain.hooks.metrics",
    "phasetrain.hooks.numerics",
    "phasetrain.hooks.progress.console",
    "phasetrain.meters.accuracy",
    "phasetrain.models.small_cnn",
    "antlr4.LL1Analyzer",
    "jinja2",
    # Add-ons, if they are installed.
    "phasetrain.addons.observe.hook_rehearsal",
    "phasetrain.addons.observe.silent_mistakes",
    "phasetrain.addons.observe.stragglers",
    "phasetrain.addons.observe.watchdog",
    "phasetrain.addons.report.hook",
    "phasetrain.addons.report.page",
)
"""Modules that runs import. Others are imported by each run that needs them."""

IDLE_SECONDS = 30
"""The parent ends after this time without a run."""

MAX_BYTES = 1 << 20
"""Maximum length of a message; longer ones cannot be sent."""


@dataclass(frozen=True)
class Order:
    """A run to start.

    Attributes:
        words: the module that is run, and its command line.
        mask: signals that it blocks, as the command that starts it.
        streams: descriptors of its standard input, output and error.
    """

    words: Sequence[str]
    mask: Sequence[int]
    streams: Sequence[int]


class Forker:
    """Forks a child per run, and reports its end.

    Args:
        connection: socket from which the runs come.
        client: descriptor of the process at its other end.
    """

    def __init__(self, connection: socket.socket, client: int) -> None:
        self._connection = connection
        self._client = client
        self._is_open = True
        self._children: dict[int, tuple[int, int]] = {}
        self._files = _stat_modules()

    def serve(self) -> Order | None:
        """Fork children until the command ends.

        Returns:
            in a child the run; in the parent None.
        """
        while self._is_open or self._children:
            watched = select.poll()
            for descriptor in (self._client, *self._children):
                watched.register(descriptor, select.POLLIN)
            if self._is_open:
                watched.register(self._connection, select.POLLIN)
            timeout = None if self._children else IDLE_SECONDS * 1000
            ready = [descriptor for descriptor, _ in watched.poll(timeout)]
            if not ready or self._client in ready:
                break
            for child in self._children.keys() & ready:
                self._report_end(child)
            order = self._receive() if self._connection.fileno() in ready else None
            if order is not None:
                return order
        return None

    def _receive(self) -> Order | None:
        """Fork for the next run; return the run in the child."""
        message, descriptors, _, _ = socket.recv_fds(self._connection, MAX_BYTES, 4)
        # Without a message the command needs no more runs. It starts another parent if it gets no
        # answer, as when this process has no descriptors left.
        self._is_open = len(descriptors) == 4 and _is_alone() and _stat_modules() == self._files
        if self._is_open:
            *streams, answers = descriptors
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError:  # no memory for another process; the other runs continue
                self._is_open = False
            else:
                if pid == 0:
                    self._leave(parent, answers)
                    return Order(**json.loads(message), streams=streams)
                self._children[os.pidfd_open(pid)] = pid, answers
                _send(answers, {"pid": pid})
                descriptors = streams
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _leave(self, parent: int, answers: int) -> None:
        """Close the parent's descriptors in a child, and let it end when the parent is killed."""
        others = [answers for _, answers in self._children.values()]
        for descriptor in (answers, self._client, *self._children, *others):
            os.close(descriptor)
        self._connection.close()
        stop_with_parent()
        if os.getppid() != parent:  # it was killed before
            os._exit(128 + signal.SIGTERM)

    def _report_end(self, child: int) -> None:
        pid, answers = self._children.pop(child)
        _, status = os.waitpid(pid, 0)
        _send(answers, {"code": os.waitstatus_to_exitcode(status)})
        os.close(answers)
        os.close(child)


def _send(descriptor: int, answer: Mapping[str, object]) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(descriptor, json.dumps(answer).encode() + b"\n")


def _is_alone() -> bool:
    """Return whether this process has a single thread, also counting threads of libraries."""
    return threading.active_count() == len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208


def _list_files() -> list[str]:
    """Return the files of all modules."""
    files = [getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()]]
    return [file for file in files if isinstance(file, str)]


def _stat_modules() -> dict[str, tuple[int, int]]:
    """Return modification time and size of the files of all modules. If a file has changed since it
    was imported, a run needs a new parent."""
    stats = {}
    for file in _list_files():
        with suppress(OSError):
            stat = os.stat(file)  # noqa: PTH116 - thousands of files before each run
            stats[file] = stat.st_mtime_ns, stat.st_size
    return stats


def find_refusal() -> str:
    """Return why a child of this process would differ from a new process; empty if it would not."""
    # Before a fork, OpenBLAS ends the threads that it has started when NumPy was imported, and
    # starts them again when it needs them.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if not _is_alone():
        return "an imported library has started threads"
    if multiprocessing.active_children():
        return "an imported library has started processes"
    for file in _list_files():
        if is_user_file(file):
            return f"{file} is imported at the start of Python, or instead of a library"
    return ""


class Ending:
    """Ends a child without Python's cleanup of memory, which would free all objects of the parent
    one by one, so that the kernel would first copy each of their pages.

    It is made before the libraries are imported: exit handlers run in reverse order, so it runs
    after theirs.

    Attributes:
        code: the exit code; None: let Python end the process.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self.end)

    def end(self) -> None:
        """End this process if its exit code is known."""
        if self.code is None:
            return
        # Objects of the parent are frozen, and not among these.
        files = [value for value in gc.get_objects() if issubclass(type(value), io.IOBase)]
        for file in sorted(files, key=_rank_file):
            with suppress(OSError, ValueError):  # Python ignores errors at this point as well
                file.close()
        ctypes.CDLL(None).fflush(None)
        os._exit(self.code & 0xFF)


def _rank_file(file: io.IOBase) -> int:
    """Return when a file is closed: a text before its buffer, and a compressed file before the file
    that it is written to."""
    if isinstance(file, io.TextIOBase):
        return 0
    if isinstance(file, io.BufferedWriter | io.BufferedRandom):
        return 2
    return 1 if isinstance(file, io.BufferedIOBase) else 3


def run_order(order: Order, ending: Ending, environment: Mapping[str, str]) -> None:
    """Make this child equal to a new process, and run the module.

    Args:
        order: the run.
        ending: ends this process.
        environment: as it was before the imports, which set variables.
    """
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in enumerate(order.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_streams()
    # After a fork Python seeds its own generator again, and NumPy and torch do not: all children
    # would have the seed that was drawn when the parent imported them.
    importlib.import_module("numpy").random.seed()
    importlib.import_module("torch").default_generator.seed()
    # The parent has looked for libraries in the working folder, before the user's last change.
    importlib.invalidate_caches()
    sys.argv = [*order.words]
    sys.orig_argv = [sys.executable, "-m", *order.words]
    # No signal was lost: the kernel keeps those that were sent since the fork.
    signal.pthread_sigmask(signal.SIG_SETMASK, order.mask)
    try:
        runpy.run_module(order.words[0], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if isinstance(error.code, int):
            ending.code = error.code
        raise


def _open_streams() -> None:
    """Make sys.stdin, sys.stdout and sys.stderr as Python does at its start: how they are buffered
    depends on the files, which differ from those of the parent."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        former = vars(sys)[name]
        is_raw = former.write_through  # -u, or PYTHONUNBUFFERED
        buffer: Any = open(  # noqa: SIM115 - until the process ends
            number,
            "wb" if number else "rb",
            buffering=0 if number and is_raw else -1,
            closefd=False,
        )
        getattr(buffer, "raw", buffer).name = f"<{name}>"
        stream: Any = io.TextIOWrapper(
            buffer,
            encoding=former.encoding,
            errors=former.errors,
            newline="\n",
            line_buffering=not is_raw and (name == "stderr" or buffer.isatty()),
            write_through=is_raw,
        )
        stream.mode = former.mode
        vars(sys).update({name: stream, f"__{name}__": stream})


def main(words: Sequence[str]) -> None:
    """Serve runs until the command that has started this process ends."""
    descriptor, client = map(int, words)
    connection = socket.socket(fileno=descriptor)
    watched = os.pidfd_open(client)
    # Another process may have its id by now.
    if os.getppid() != client:
        return
    ending = Ending()
    environment = dict(os.environ)
    for name in IMPORTED:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    refusal = find_refusal()
    if refusal:
        _refuse(connection, refusal)
        os._exit(1)
    gc.collect()
    # A traversal of garbage collection would copy the pages of all objects into each child.
    gc.freeze()
    order = Forker(connection, watched).serve()
    if order is None:
        os._exit(0)
    run_order(order, ending, environment)


def _refuse(connection: socket.socket, refusal: str) -> None:
    _, descriptors, _, _ = socket.recv_fds(connection, MAX_BYTES, 4)
    if descriptors:
        _send(descriptors[-1], {"refusal": refusal})


if __name__ == "__main__":
    main(sys.argv[1:])
