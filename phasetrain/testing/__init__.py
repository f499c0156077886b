"""The proof kit: checks phasetrain's promises for custom parts, with any test framework or none."""

from collections.abc import Sequence
from typing import Any

from phasetrain.config.addons import find_service, require_service
from phasetrain.proof.compare import differences
from phasetrain.testing.kills import KillAfter, Killed, SaveEachStep
from phasetrain.testing.resume import assert_exact_resume
from phasetrain.testing.round_trip import assert_state_round_trip
from phasetrain.testing.world import assert_world_size_invariant


def _require_memory_handler(*_: Any) -> Any:
    return require_service("memory_handler", "remote", "phasetrain.testing.MemoryHandler")


MemoryHandler: Any = find_service("memory_handler") or _require_memory_handler
"""An object store in memory for iopath, under `mem://`, of the add-on `remote`; without the add-on,
a call is an error that names it."""


def assert_learns_one_batch(
    overrides: Sequence[str],
    *,
    updates: int = 200,
    factor: float = 10.0,
    config_dir: str | None = None,
) -> list[float]:
    """Check that the loss falls when training on one batch, and return the loss of each update; see
    `phasetrain.addons.observe.learning`."""
    check = require_service("assert_learns_one_batch", "observe", "assert_learns_one_batch")
    losses: list[float] = check(overrides, updates=updates, factor=factor, config_dir=config_dir)
    return losses


def assert_no_device_sync(overrides: Sequence[str], *, config_dir: str | None = None) -> None:
    """Check that train steps do not wait for the device; see
    `phasetrain.addons.observe.device_sync`."""
    check = require_service("assert_no_device_sync", "observe", "assert_no_device_sync")
    check(overrides, config_dir=config_dir)


__all__ = [
    "KillAfter",
    "Killed",
    "MemoryHandler",
    "SaveEachStep",
    "assert_exact_resume",
    "assert_learns_one_batch",
    "assert_no_device_sync",
    "assert_state_round_trip",
    "assert_world_size_invariant",
    "differences",
]
