"""Starts whole runs under faults from outside: failing system calls, limits, other users; and looks
at what is left.

A program of its own too, started once for a module of tests: it imports torch once (seconds), and
each run is a fork of it (tenths of a second) in a session of its own that does what the command
line does. System calls are made to fail by a shared library that stands before the C library
(LD_PRELOAD), compiled with gcc.
"""

import contextlib
import ctypes
import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kill_findings import session

HERE = Path(__file__).parent
ONE = "MACHINE.threads=1"
"""For many small runs, side by side with other tests: a second thread gains nothing, and bits
depend on the number."""
GONE_SECONDS = 15.0
"""How long a process may outlive its main process: torch has a loader worker look for it every 5
s."""

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

struct rule { char call[16], path[128]; int error, first, last, milliseconds; atomic_int calls; };
static struct rule rules[8];
static int count;

void fault_add(const char *call, const char *path, int error, int first, int last, int milliseconds) {
    struct rule *one = &rules[count++];
    strncpy(one->call, call, sizeof one->call - 1);
    strncpy(one->path, path, sizeof one->path - 1);
    one->error = error; one->first = first; one->last = last; one->milliseconds = milliseconds;
}

static int refused(const char *call, const char *path) {
    for (int i = 0; i < count; i++) {
        struct rule *one = &rules[i];
        if (strcmp(one->call, call) || !strstr(path, one->path)) continue;
        int n = ++one->calls;
        if (n < one->first || n > one->last) continue;
        if (one->milliseconds) usleep(1000 * one->milliseconds);
        if (one->error == -1) raise(SIGKILL);
        if (one->error) { errno = one->error; return 1; }
    }
    return 0;
}

static int refused_at(const char *call, int handle) {
    if (!count) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return refused(call, path);
}

#define NEXT(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

ssize_t write(int handle, const void *data, size_t n) {
    return refused_at("write", handle) ? -1 : NEXT(write)(handle, data, n);
}
ssize_t pwrite64(int handle, const void *data, size_t n, off64_t at) {
    return refused_at("write", handle) ? -1 : NEXT(pwrite64)(handle, data, n, at);
}
int fsync(int handle) { return refused_at("fsync", handle) ? -1 : NEXT(fsync)(handle); }
int rename(const char *from, const char *to) { return refused("rename", to) ? -1 : NEXT(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return refused("mkdir", path) ? -1 : NEXT(mkdir)(path, mode); }
int unlink(const char *path) { return refused("unlink", path) ? -1 : NEXT(unlink)(path); }
ssize_t read(int handle, void *data, size_t n) {
    return refused_at("read", handle) ? -1 : NEXT(read)(handle, data, n);
}
int open64(const char *path, int flags, ...) {
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more);
    int writes = flags & (O_WRONLY | O_RDWR | O_CREAT);
    return refused(writes ? "open" : "look", path) ? -1 : NEXT(open64)(path, flags, mode);
}
"""


@dataclass(frozen=True)
class Fault:
    """System calls that fail.

    Attributes:
        call: write, fsync, rename, mkdir, unlink, read, open (for writing) or look (open for
            reading).
        path: what stands in the path of the file.
        error: name of the errno; KILL for a SIGKILL within the call, empty for a call that only
            takes long.
        first, last: numbers of the calls, from 1 on; the last may be left out.
        milliseconds: how much longer each takes.
    """

    call: str
    path: str
    error: str = ""
    first: int = 1
    last: int = 1_000_000
    milliseconds: int = 0

    @property
    def number(self) -> int:
        """The errno, 0 for none, -1 for a kill."""
        return -1 if self.error == "KILL" else getattr(errno, self.error) if self.error else 0


@dataclass(frozen=True)
class Ended:
    """What came of a run.

    Attributes:
        code: exit code; the negative number of the signal where the kernel ended it.
        output: what it printed.
        alive: processes of its session that lived on.
        segments: files in /dev/shm that its processes left.
        seconds: wall time.
    """

    code: int
    output: str
    alive: list[int] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    seconds: float = 0.0


def compiled(folder: Path) -> Path | None:
    """Return the shared library, or None where there is no gcc."""
    if shutil.which("gcc") is None:
        return None
    source, library = folder / "faults.c", folder / "faults.so"
    source.write_text(SOURCE)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return library if done.returncode == 0 else None


class Starter:
    """Starts runs, one at a time; a context that ends with its program.

    Attributes:
        faults: whether system calls can be made to fail here.
    """

    def __init__(self, folder: Path) -> None:
        library = compiled(folder)
        self.faults = library is not None
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        environment |= {"LD_PRELOAD": str(library)} if library else {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder / "warm")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )

    def __enter__(self) -> "Starter":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(
        self, folder: Path, *words: str, faults: tuple[Fault, ...] = (), **options: Any
    ) -> Ended:
        """Run the command line with RUN.dir=`folder` to its end.

        Args:
            faults: system calls that fail.
            options: `uid`, the user; `cwd`, the current folder; `path`, a list of folders from
                which modules are imported before others, by default the current one, as with
                `python -m`.
        """
        self.start(folder, *words, faults=faults, **options)
        return self.wait()

    def start(
        self, folder: Path, *words: str, faults: tuple[Fault, ...] = (), **options: Any
    ) -> int:
        """Start the command line and return the id of its process, which leads a session of its
        own."""
        self._output = folder.with_name(folder.name + ".txt")
        self._before, self._began = shared_memory(), time.monotonic()
        order = {
            "words": [f"RUN.dir={folder}", *words],
            "output": str(self._output),
            "cwd": str(folder.parent),
        }
        order |= {
            "faults": [asdict(fault) | {"number": fault.number} for fault in faults]
        } | options
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._pid = int(self._answer())
        return self._pid

    def wait(self) -> Ended:
        """Wait until the run that was started has ended, and its session with it."""
        code, seconds = int(self._answer()), time.monotonic() - self._began
        end = time.monotonic() + GONE_SECONDS
        while (alive := session(self._pid)) and time.monotonic() < end:
            time.sleep(0.02)
        for one in alive:
            os.kill(one, signal.SIGKILL)
        segments = [name for name in shared_memory() - self._before if str(self._pid) in name]
        return Ended(code, self._output.read_text(errors="replace"), alive, segments, seconds)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program that starts runs has ended"
        return line


def shared_memory() -> set[str]:
    """Return the names of all segments of shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir()}


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "2m") -> Iterator[Path]:
    """Mount a file system in memory of a given size at `folder`.

    Raises:
        PermissionError: this user may not mount.
    """
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that other users may enter, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def apply(order: dict[str, Any]) -> None:
    """Bring the faults about that an order names, in the process that is to meet them."""
    for fault in order["faults"]:
        text = (fault["call"].encode(), fault["path"].encode())
        numbers = (fault["number"], fault["first"], fault["last"], fault["milliseconds"])
        ctypes.CDLL(None).fault_add(*text, *numbers)
    os.chdir(order["cwd"])
    if "uid" in order:
        os.setgid(order["uid"])
        os.setuid(order["uid"])


def obey(order: dict[str, Any]) -> int:
    """Do what the command line does, and return its exit code."""
    from phasetrain.commands.cli import main

    try:
        os.setsid()
        sys.stdin.close()
        output = os.open(
            order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o666
        )
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
        sys.path[:0] = order.get("path", [order["cwd"]])
        apply(order)
        return main(order["words"])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - a fork must not go on with what its parent was about to do
        traceback.print_exc()
        return 1


def wait_for_threads() -> None:
    """Wait until this process has one thread: a lock that another one holds during a fork stays
    locked in the child."""
    end = time.monotonic() + 10.0
    while len(list(Path("/proc/self/task").iterdir())) > 1:
        assert time.monotonic() < end, "a thread has stayed; a fork might hang"
        time.sleep(0.001)


def serve(warm: str) -> None:
    """Fork a run for each order that comes in, and tell its process and its end."""
    import torch

    from phasetrain.commands.cli import main

    torch.set_num_threads(1)  # a pool of threads would not live on in a fork
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([f"RUN.dir={warm}", "PHASES.epochs=0"]) == 0
    for line in sys.stdin:
        wait_for_threads()
        pid = os.fork()
        if pid == 0:
            os._exit(obey(json.loads(line)) & 0xFF)
        print(pid, flush=True)  # noqa: T201 - the answer
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201 - the answer


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond `size` bytes; -1 for no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


if __name__ == "__main__":
    serve(sys.argv[1])
