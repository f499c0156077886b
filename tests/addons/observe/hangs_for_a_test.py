"""A transform and a hook that hang once, in one place, in a process of their own."""

import atexit
import ctypes
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phasetrain.data.transforms import TRANSFORMS
from phasetrain.hooks import HOOKS, Hook

LONG = 1000


def hold_the_lock() -> None:
    """Hang in C code that holds the interpreter's lock."""
    ctypes.PyDLL(None).sleep(LONG)


def block_in_c() -> None:
    """Hang as `.item()` does when the device never answers: in C code, without the lock."""
    ctypes.CDLL(None).sleep(LONG)


def call_alone() -> None:
    """Make a collective call that no other rank makes."""
    dist.barrier()


WAYS = {
    "python": lambda: time.sleep(LONG),
    "lock": hold_the_lock,
    "c": block_in_c,
    "collective": call_alone,
    "exit": lambda: atexit.register(time.sleep, LONG),
}


class Trap:
    """Hangs in each attempt until it has done so `times` times."""

    def __init__(self, marker: str, times: int = 1) -> None:
        self.marker = Path(marker)
        self.times = times

    def spring(self, way: str) -> None:
        """Hang, unless it has been often enough."""
        count = len(self.marker.read_text()) if self.marker.exists() else 0
        if count < self.times:
            self.marker.write_text("x" * (count + 1))
            WAYS[way]()


@HOOKS.register("hangs")
class Hangs(Hook):
    """Hangs at an event of rank `rank` after `updates` updates."""

    main_only = False
    observe_only = True

    def __init__(
        self, marker: str, event: str, way: str = "python", rank: int = 0, times: int = 1
    ) -> None:
        self.trap = Trap(marker, times)
        self.event, self.way, self.rank = event, way, rank

    def spring(self, run: Any, event: str) -> None:
        if (event, run.world.rank) == (self.event, self.rank) and run.state.updates >= 7:
            self.trap.spring(self.way)

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        self.spring(run, "on_forward")

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        self.spring(run, "on_step")

    def on_save(self, run: Any) -> None:
        self.spring(run, "on_save")

    def on_end(self, run: Any) -> None:
        self.spring(run, "on_end")


@HOOKS.register("arms")
class Arms(Hook):
    """Writes the process id into a file, from the third update on."""

    observe_only = True

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_step_start(self, run: Any, phase: Any) -> None:
        if run.state.updates >= 2:
            self.file.write_text(str(os.getpid()))


@TRANSFORMS.register("hangs")
class HangingTransform:
    """Hangs in the process that a file names, and in its workers."""

    def __init__(self, armed: str) -> None:
        self.armed = Path(armed)

    def __call__(self, image: Any) -> Any:
        own = {str(os.getpid()), str(os.getppid())}
        if self.armed.exists() and self.armed.read_text() in own:
            time.sleep(LONG)
        return image
