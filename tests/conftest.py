"""What holds for every test: no test leaves a trace in the process, and a torchvision without its
operators imports."""

import gc
import logging
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from operators import declared_operators

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_OPERATORS = declared_operators()  # operators live as long as the library object


def global_state() -> dict[str, Any]:
    """Return what a run may change in its process and has to put back."""
    logger = logging.getLogger("phasetrain")
    return {
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill of uninitialised memory": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "signal handlers": {name.name: signal.getsignal(name) for name in SIGNALS},
        "handlers of the logger": list(logger.handlers),
        "level and propagation of the logger": (logger.level, logger.propagate),
    }


COLLECTED = pytest.StashKey[frozenset[str]]()
"""Names of all tests that this session has collected, slow ones included, parameters in brackets
left out."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what there is before options such as -m leave a part of it out."""
    config.stash[COLLECTED] = frozenset(item.nodeid.partition("[")[0] for item in items)


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of the collector's sight: a run that collects looks
    at all it sees."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape captured text that is no UTF-8: xdist cannot send it from a worker otherwise."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have recorded with `record_property("summary", ...)`."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in report.user_properties:
                if name == "summary":
                    terminalreporter.write_line(value)


@pytest.fixture(scope="session")
def collected_here(pytestconfig: pytest.Config) -> frozenset[str]:
    """Return the names of the tests that this session has collected, deselected ones included."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture
def snapshot() -> Callable[[], dict[str, Any]]:
    """Return the function that looks at global state, for the test of the guard below."""
    return global_state


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which global state differs from before."""
    before = global_state()
    yield
    after = global_state()
    changed = [
        f"{name}: {before[name]!r} -> {after[name]!r}"
        for name in before
        if after[name] != before[name]
    ]
    assert not changed, "the test changed global state and did not put it back:\n" + "\n".join(
        changed
    )
