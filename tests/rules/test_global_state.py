"""The fixture that guards global state sees each kind of change."""

import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

Snapshot = Callable[[], dict[str, Any]]


def _set_threads() -> Callable[[], object]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    return lambda: torch.set_num_threads(before)


def _set_deterministic() -> Callable[[], object]:
    torch.use_deterministic_algorithms(mode=True)
    return lambda: torch.use_deterministic_algorithms(mode=False)


def _set_signal() -> Callable[[], object]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR1, before)


def _add_handler() -> Callable[[], object]:
    logger, handler = logging.getLogger("phasetrain"), logging.NullHandler()
    logger.addHandler(handler)
    return lambda: logger.removeHandler(handler)


@pytest.mark.parametrize("change", [_set_threads, _set_deterministic, _set_signal, _add_handler])
def test_change_of_global_state_is_reported(
    change: Callable[[], Callable[[], object]], snapshot: Snapshot
) -> None:
    before = snapshot()
    restore = change()
    changed = snapshot()
    restore()
    assert changed != before
    assert snapshot() == before
