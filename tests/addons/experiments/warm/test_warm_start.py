"""Runs that are forked from a warm parent are what new processes would be."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL

from phasetrain.addons.experiments.sweep import sweep
from phasetrain.addons.experiments.sweep.jobs import read_job_records
from phasetrain.addons.experiments.warm import start
from phasetrain.addons.experiments.warm.start import SWITCH, Process, WarmProcess, start_process
from phasetrain.runs.view import read_status
from phasetrain.runtime.child_processes import COMMAND

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or any(Path(device).exists() for device in start.GPUS),
    reason="runs are new processes here",
)

# Imported by RUN.imports: writes what a process can see of itself, then does as RUN.name says.
PART = """
import ctypes, faulthandler, gc, gzip, json, os, random, resource, signal, sys, threading, warnings
import multiprocessing.resource_tracker
from pathlib import Path
import numpy
import torch

VALUE = 1

def describe(stream):
    names = ("encoding", "errors", "name", "mode", "line_buffering", "write_through", "newlines")
    values = {name: getattr(stream, name) for name in names}
    return values | {"tty": stream.isatty(), "file": stream.fileno(), "seeks": stream.seekable()}

main = sys.modules["__main__"]
facts = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": repr(sys.flags),
    "warnings": [repr(entry) for entry in warnings.filters if "sympy" not in repr(entry)],
    "main": [main.__name__, main.__file__, main.__spec__.name],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "streams": [describe(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "originals": [sys.__stdout__ is sys.stdout, sys.__stderr__ is sys.stderr],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    "signals": [str(getattr(signal.getsignal(n), "__name__", signal.getsignal(n))) for n in signal.valid_signals()],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "group": [os.getpgrp(), os.getsid(0)],
    "limits": [resource.getrlimit(limit) for limit in range(16)],
    "umask": os.umask(0o22) or os.umask(0o22),
    "cores": [os.nice(0), sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0)],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
    "kernels": torch.backends.cpu.get_cpu_capability(),
    "autograd": torch.is_grad_enabled(),
    "collector": [gc.isenabled(), gc.get_threshold()],
    "faulthandler": faulthandler.is_enabled(),
    "tracker": multiprocessing.resource_tracker._resource_tracker._fd,
}
drawn = {"numpy": numpy.random.random(), "torch": torch.rand(1).item(), "python": random.random()}
drawn |= {"value": VALUE, "parent": os.getppid()}
word = next(word for word in sys.argv if word.startswith("RUN.name=")).removeprefix("RUN.name=")
Path(f"{word}.json").write_text(json.dumps({"facts": facts, "drawn": drawn}))
print("printed")
what = word.partition("-")[0]
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "crash":
    ctypes.string_at(0)
elif what == "leave":
    os._exit(3)
elif what == "end":
    import atexit
    atexit.register(print, "registered")
    text, packed = open("text.txt", "w"), gzip.open("packed.gz", "wt")
    sys.kept = [text, packed]
    print("left open", file=text)
    print("left open", file=packed)
    threading.Timer(0.1, print, ["thread"]).start()
    raise RuntimeError("no such part")
elif what == "change":
    path = Path(__file__)
    path.write_text(path.read_text().replace("VALUE = 1", "VALUE = 2"))
    os._exit(3)
elif what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    Path("waits").touch()
    signal.pause()
"""


DRAWN = ("numpy", "torch", "python")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the working folder of all runs here, which so have one warm parent."""
    path = tmp_path_factory.mktemp("warm")
    (path / "part.py").write_text(PART)
    yield path
    start.find_parent.cache_clear()


def list_environment(**changes: str) -> dict[str, str]:
    """Return an environment that is the same in all tests."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"} | changes


def start_part(folder: Path, name: str, **changes: str) -> Process:
    """Start a run with the part above."""
    words = [*COMMAND, *SMALL, "RUN.imports=[part]", f"RUN.dir=runs/{name}", f"RUN.name={name}"]
    with (folder / f"{name}.log").open("ab") as output:
        return start_process(
            words,
            list_environment(**changes),
            cwd=str(folder),
            stdin=subprocess.DEVNULL,
            output=output,
        )


def read_facts(folder: Path, name: str) -> dict[str, Any]:
    """Return what a run has written."""
    facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return facts


def run_part(folder: Path, name: str, **changes: str) -> tuple[int, dict[str, Any]]:
    """Start a run with the part above, and return its exit code and what it has written."""
    code = start_part(folder, name, **changes).wait()
    return code, read_facts(folder, name)


def is_warm(facts: dict[str, Any]) -> bool:
    """Return whether a run was forked: a new process is a child of this one."""
    return facts["drawn"]["parent"] != os.getpid()


@pytest.mark.feature(
    "sweep.warm",
    "runs of sweeps and judgements without the time to import torch",
    "`PHASETRAIN_WARM_START`",
)
def test_warm_run_sees_what_a_new_process_sees(folder: Path) -> None:
    code, new = run_part(folder, "leave", **{SWITCH: "0"})
    log = (folder / "leave.log").read_text()
    (folder / "leave.log").unlink()
    assert (code, is_warm(new)) == (3, False)
    code, warm = run_part(folder, "leave")
    assert (code, is_warm(warm)) == (3, True)
    assert new["facts"]["environment"].pop(SWITCH) == "0"
    assert warm["facts"] == new["facts"]
    assert warm["facts"]["folder"] == str(folder)
    assert (folder / "leave.log").read_text() == log
    other = run_part(folder, "leave")[1]
    assert [other["drawn"][name] == warm["drawn"][name] for name in DRAWN] == [False] * 3
    assert other["drawn"]["parent"] == warm["drawn"]["parent"]


def test_warm_run_ends_as_a_new_process_ends(folder: Path) -> None:
    code, facts = run_part(folder, "end")
    assert (code, is_warm(facts)) == (2, True)
    log = (folder / "end.log").read_text().splitlines()
    assert [log[0], *log[-2:]] == ["printed", "thread", "registered"]
    assert "no such part" in log[1]
    assert (folder / "text.txt").read_text() == "left open\n"
    assert gzip.decompress((folder / "packed.gz").read_bytes()) == b"left open\n"


@pytest.mark.parametrize(
    ("name", "code"), [("kill", -signal.SIGKILL), ("crash", -signal.SIGSEGV), ("leave", 3)]
)
def test_crash_of_a_run_harms_no_other(folder: Path, name: str, code: int) -> None:
    waiting = start_part(folder, f"wait-{name}")
    wait_for(folder / "waits")
    (folder / "waits").unlink()
    ended, facts = run_part(folder, name)
    assert ended == code
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait() == 5
    parents = {read_facts(folder, run)["drawn"]["parent"] for run in (name, f"wait-{name}")}
    assert parents == {facts["drawn"]["parent"]}
    assert is_warm(facts)


@pytest.mark.slow
def test_next_run_of_a_sweep_sees_a_file_that_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = [*SMALL, "RUN.imports=[part]", "RUN.name=change-a,leave-b", "hydra.sweep.dir=sweep"]
    assert sweep(words, check=lambda overrides: None) == 1
    (folder / "part.py").write_text(PART)
    runs = [read_facts(folder, name)["drawn"] for name in ("change-a", "leave-b")]
    assert [run["value"] for run in runs] == [1, 2]
    assert runs[0]["parent"] == runs[1]["parent"] != os.getpid()
    assert {record.exit_code for record in read_job_records("sweep")} == {3}


def test_libraries_are_imported_with_the_environment_of_the_run(folder: Path) -> None:
    _, facts = run_part(folder, "leave-threads", OMP_NUM_THREADS="1")
    assert is_warm(facts)
    assert facts["facts"]["threads"][0] == 1


# A library that Python imports at its start, and that the parent would hand to all runs.
SITES = {
    "user": "",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()",
}


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_parent_that_is_not_clean_starts_no_run(folder: Path, tmp_path: Path, site: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(site)
    code, facts = run_part(folder, "leave-site", PYTHONPATH=str(tmp_path))
    assert (code, is_warm(facts)) == (3, False)


def test_run_is_a_new_process_where_there_is_a_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "GPUS", (str(folder),))
    assert not is_warm(run_part(folder, "leave-gpu")[1])


@pytest.mark.slow
def test_run_stops_with_its_parent_and_the_next_one_gets_another(folder: Path) -> None:
    waiting = start_part(folder, "wait-parent")
    wait_for(folder / "waits")
    (folder / "waits").unlink()
    parent = read_facts(folder, "wait-parent")["drawn"]["parent"]
    os.kill(parent, signal.SIGKILL)
    assert waiting.wait() == -signal.SIGTERM
    code, facts = run_part(folder, "leave-next")
    assert (code, is_warm(facts)) == (3, True)
    assert facts["drawn"]["parent"] != parent


CLIENT = """
import os, sys
from pathlib import Path
from test_warm_start import start_part
start_part(Path(sys.argv[1]), "wait-client").wait()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_killed_command_leaves_no_process(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    search = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    client = subprocess.Popen(
        [sys.executable, str(tmp_path / "client.py"), str(folder)],
        env=list_environment(PYTHONPATH=search),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    wait_for(folder / "waits")
    (folder / "waits").unlink()
    assert len(list_session(client.pid)) == 3
    if number == signal.SIGINT:
        os.killpg(client.pid, number)  # as a terminal does
    else:
        client.send_signal(number)
    client.wait()
    wait_until(lambda: not list_session(client.pid))


@pytest.mark.slow
def test_bits_are_those_of_a_new_process(folder: Path) -> None:
    digests = []
    for switch, threads in (("0", "null"), ("1", "null"), ("0", "1"), ("1", "1")):
        run = f"runs/bits-{switch}-{threads}"
        words = [*COMMAND, *SMALL, f"MACHINE.threads={threads}", f"RUN.dir={run}"]
        environment = list_environment(**{SWITCH: switch})
        process = start_process(words, environment, cwd=str(folder), stdin=subprocess.DEVNULL)
        assert isinstance(process, WarmProcess) == (switch == "1")
        assert process.wait() == 0
        digests.append(read_status(folder / run).digest)
    assert digests[0] == digests[1]
    assert digests[2] == digests[3]


@pytest.mark.slow
@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AVX-512"
)
def test_parent_has_not_chosen_the_kernels_of_torch(folder: Path) -> None:
    words = [*COMMAND, *SMALL, "MACHINE.cpu_capability=AVX2", "RUN.dir=runs/kernels"]
    process = start_process(words, list_environment(), cwd=str(folder))
    assert isinstance(process, WarmProcess)
    assert process.wait() == 0
    environment = json.loads((folder / "runs/kernels/environment.json").read_text())
    assert environment["switches"]["cpu_capability"] == "AVX2"


@pytest.mark.slow
def test_warm_run_starts_its_ranks(folder: Path) -> None:
    words = [*COMMAND, *SMALL, "LAUNCH.processes=2", "RUN.dir=runs/ranks"]
    process = start_process(words, list_environment(), cwd=str(folder))
    assert isinstance(process, WarmProcess)
    assert process.wait() == 0
    assert read_status(folder / "runs/ranks").state == "finished"


def wait_for(path: Path) -> None:
    """Wait for a file."""
    wait_until(path.exists)


def wait_until(is_done: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def list_session(session: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found
