"""Checkpoint protocols with one planted fault each, which the kill suite must detect when they run
in a child process."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from phasetrain.app.train import training
from phasetrain.checkpoint import Checkpointer
from phasetrain.runtime.storage import Storage


def replace_method(owner: type | ModuleType, name: str, method: Callable[..., Any]) -> None:
    """Replace a method of a class or a function of a module; a name that it does not have is an error,
    because the protocol would be sound."""
    assert callable(getattr(owner, name)), name
    setattr(owner, name, method)


def nothing() -> None:
    """Change nothing."""


def write_in_place(begin: Callable[[Storage, str], str]) -> None:
    """Let saves write into the folder that `begin` returns, without publishing it by a rename."""
    replace_method(Storage, "begin_folder", begin)
    replace_method(Storage, "publish_folder", lambda self, working, folder: None)
    replace_method(Storage, "abandon_folder", lambda self, working, folder: None)


def overwrite_in_place() -> None:
    """Keep one checkpoint and overwrite it in each save, as `torch.save` to last.ckpt does."""
    create = Storage.create

    def begin_in_newest(storage: Storage, folder: str) -> str:
        before = sorted(Path(folder).parent.glob("p*"))
        if before:
            before[-1].rename(folder)
        storage.make_folder(folder)
        return folder

    def overwrite(storage: Storage, path: str, *args: Any, **options: Any) -> Any:
        Path(path).unlink(missing_ok=True)
        return create(storage, path, *args, **options)

    write_in_place(begin_in_newest)
    replace_method(Storage, "create", overwrite)


def newest_wins() -> None:
    """Write each checkpoint in place, without a rename, and consider only the newest by name."""
    list_names = Storage.list_names

    def begin(storage: Storage, folder: str) -> str:
        storage.make_folder(folder)
        return folder

    def list_newest(storage: Storage, folder: str) -> list[str]:
        names = list_names(storage, folder)
        if folder.endswith("/checkpoints"):
            return names[-1:]
        return names

    write_in_place(begin)
    replace_method(Storage, "list_names", list_newest)


def start_over() -> None:
    """Treat every checkpoint as missing, as a broad `except` around the load would."""
    replace_method(Checkpointer, "load_newest", lambda self: None)


def forget_momentum() -> None:
    """Restore everything but the optimizer."""
    replace_method(torch.optim.SGD, "load_state_dict", lambda self, state: None)


def sweep_nothing() -> None:
    """Do not delete the leftovers of an interrupted save."""
    replace_method(Storage, "delete_leftovers", lambda self, root, is_folder, last: [])


def forget_old() -> None:
    """Delete the old folder in a restart instead of keeping it."""
    replace_method(Storage, "rename_folder", lambda self, folder, new: self.remove(folder))


def claim_exact() -> None:
    """Do not record that a run with `exact: false` is not exact."""
    replace_method(training, "list_inexact_splits", lambda setup: [])


def outlive() -> None:
    """Start a process that outlives its parent."""
    subprocess.Popen(["sleep", "60"])


PROTOCOLS: dict[str, Callable[[], None]] = {
    "sound": nothing,
    "overwrite_in_place": overwrite_in_place,
    "newest_wins": newest_wins,
    "start_over": start_over,
    "forget_momentum": forget_momentum,
    "sweep_nothing": sweep_nothing,
    "outlive": outlive,
    "forget_old": forget_old,
    "claim_exact": claim_exact,
}
