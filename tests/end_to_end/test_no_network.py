"""Import, help and a training open no connection and look up no name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPORT_FILES

# An audit hook sees what Python code does with sockets, also in libraries that keep references to
# the functions of the module socket.
PROGRAM = """
import json, runpy, sys

EVENTS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
          "socket.gethostbyname", "socket.gethostbyaddr", "urllib.Request"}
found = []

def notice(event, args):
    if event in EVENTS:
        found.append([event, repr(args[1:])])

sys.addaudithook(notice)
if sys.argv[1] == "control":
    import socket
    socket.getaddrinfo("127.0.0.1", 80)
else:
    import phasetrain
    for words in json.loads(sys.argv[1]):
        sys.argv = ["phasetrain", *words]
        try:
            runpy.run_module("phasetrain", run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
print("\\n" + json.dumps(found))
"""


def list_network_calls(argument: str, folder: Path) -> Any:
    """Return what a fresh interpreter asked of the network."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.feature(
    "no_network", "no connection is opened unless a config names one", "[runs.md](runs.md#trust)"
)
def test_nothing_connects(tmp_path: Path) -> None:
    commands = [
        ["--help"],
        ["help", "train"],
        ["PHASES.updates=3", "RUN.dir=run"],
        ["test", "run"],
        ["runs", "list", "--json"],
    ]
    assert list_network_calls(json.dumps(commands), tmp_path) == []
    assert (tmp_path / "run" / "report.html").is_file() is bool(REPORT_FILES)


def test_network_calls_would_be_seen(tmp_path: Path) -> None:
    assert [event for event, _ in list_network_calls("control", tmp_path)] == ["socket.getaddrinfo"]
