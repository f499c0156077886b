"""Makes system calls fail with a shared library that is loaded before the C library (LD_PRELOAD)
and compiled with gcc."""

import errno
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
    """A system call that fails.

    Attributes:
        call: write, fsync, rename, mkdir, unlink, read, open (for writing) or look (open for
            reading).
        path: text that the path of the file contains.
        error: name of the errno; KILL for a SIGKILL within the call, empty for a call that is only
            slow.
        first, last: range of the calls that fail, counted from 1; by default all of them.
        milliseconds: delay of each call.
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


def compile_library(folder: Path) -> Path | None:
    """Compile the shared library and return its path, or None without gcc."""
    if shutil.which("gcc") is None:
        return None
    source, library = folder / "faults.c", folder / "faults.so"
    source.write_text(SOURCE)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return library if done.returncode == 0 else None
