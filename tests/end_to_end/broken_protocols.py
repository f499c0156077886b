"""Protocols that are broken in one place each: done in a child of the kill suite, they must be
found out."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from phasetrain.checkpoint import Checkpointer
from phasetrain.runtime.storage import Storage


def nothing() -> None:
    """Leave everything as it is."""


def overwrite_in_place() -> None:
    """Keep one checkpoint, and write each over the one before, as `torch.save` to last.ckpt
    does."""
    create = Storage.create

    def begin(self: Storage, folder: str) -> str:
        before = sorted(Path(folder).parent.glob("p*"))
        if before:
            before[-1].rename(folder)
        self.make_folder(folder)
        return folder

    def over(self: Storage, path: str, *args: object, **options: object) -> object:
        Path(path).unlink(missing_ok=True)
        return create(self, path, *args, **options)

    Storage.begin, Storage.create = begin, over
    Storage.publish = Storage.abandon = lambda self, working, folder: None


def newest_wins() -> None:
    """Write each checkpoint in place, without a rename, and read the newest by name, whatever is in
    it."""
    listed = Storage.names
    Storage.begin = lambda self, folder: self.make_folder(folder) or folder
    Storage.publish = Storage.abandon = lambda self, working, folder: None
    Storage.names = lambda self, folder: listed(self, folder)[
        -1 if folder.endswith("/checkpoints") else 0 :
    ]


def start_over() -> None:
    """Take every checkpoint for none, as a broad `except` around the load does."""
    Checkpointer.newest = lambda self: None


def forget_momentum() -> None:
    """Restore everything but the optimizer."""
    torch.optim.SGD.load_state_dict = lambda self, state: None


def sweep_nothing() -> None:
    """Leave what an interrupted save has left."""
    Storage.sweep = lambda self, root, is_folder, last: []


def outlive() -> None:
    """Start a process that never looks whether its parent lives."""
    subprocess.Popen(["sleep", "60"])


PROTOCOLS: dict[str, Callable[[], None]] = {
    "sound": nothing,
    "overwrite_in_place": overwrite_in_place,
    "newest_wins": newest_wins,
    "start_over": start_over,
    "forget_momentum": forget_momentum,
    "sweep_nothing": sweep_nothing,
    "outlive": outlive,
}
