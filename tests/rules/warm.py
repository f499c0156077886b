"""Starts phasetrain and Python programs by forking a process that has imported torch already, for
the docs' code.

    python warm.py serve SOCKET                            import, say `ready`, serve until standard
    input ends python warm.py run SOCKET phasetrain [ARGUMENT ...]    as `phasetrain ARGUMENT ...`
    would, in this folder python warm.py run SOCKET FILE [ARGUMENT ...]          as
    `python FILE ARGUMENT ...` would

Only importing is shared: the server trains nothing, and every program has a process, a folder and
an environment of its own. Signals are not passed on.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

IMPORTED = ("phasetrain.app.engines", "phasetrain.cli")


def serve(path: str) -> None:
    """Answer requests until standard input ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    _declare_operators()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        os.write(1, b"ready\n")
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                answer(connection)
            connection.close()


def _declare_operators() -> None:
    """Let programs import a torchvision that was built for another torch, as conftest.py does for
    tests."""
    folder = str(Path(__file__).parents[1] / "end_to_end")
    sys.path.insert(0, folder)
    library = importlib.import_module("operators").declared_operators()
    # Programs must not find the modules of the tests.
    sys.path.remove(folder)
    _KEPT.append(library)


_KEPT: list[Any] = []
"""Objects that must live as long as the server."""


def answer(connection: socket.socket) -> None:
    """Run one program, send its exit code and end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    worker = os.fork()
    if worker == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os._exit(program(json.loads(message)))
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    connection.sendall(str(code).encode())
    os._exit(0)


def program(request: dict[str, Any]) -> int:
    """Run what the request asks for, as a program of its own, and return the exit code."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [request["folder"], *filter(None, paths)]
    sys.argv = request["words"]
    code: Any = 0
    try:
        if sys.argv[0] == "phasetrain":
            code = importlib.import_module("phasetrain.cli").main(sys.argv[1:])
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def request(path: str, words: list[str]) -> int:
    """Ask the server to run a program with the streams, folder and environment of this process."""
    content = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(content).encode()], [0, 1, 2])
        code = int(connection.recv(16) or 1)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    if role == "serve":
        serve(where)
    else:
        sys.exit(request(where, rest))
