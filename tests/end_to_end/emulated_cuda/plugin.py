"""Emulates CUDA for a whole run of pytest, so that tests marked `gpu` run without one:

PYTHONPATH=tests/end_to_end pytest -p emulated_cuda.plugin -m gpu tests
"""

from contextlib import ExitStack

import pytest

from emulated_cuda.api import emulate_cuda, why_not_emulated

STACK = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin, before test modules ask whether there is a device."""
    reason = why_not_emulated()
    if reason is not None:
        raise pytest.UsageError(reason)
    config.stash[STACK] = ExitStack()
    config.stash[STACK].enter_context(emulate_cuda())


def pytest_unconfigure(config: pytest.Config) -> None:
    """End; an error names races and pickled tensors."""
    if STACK in config.stash:
        config.stash[STACK].close()
