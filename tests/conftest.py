"""Rules for every test: no test changes global state, serial tests run alone, and a torchvision
without its operators can be imported."""

import fcntl
import gc
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from operators import declared_operators

from phasetrain.config.addons import load_addons

OWN_ADDONS = (
    "adapters",
    *("authoring", "deploy", "experiments", "libraries", "metrics", "observe", "optimizers"),
    *("reload", "remote", "report", "sampling", "sharding", "submission", "text", "vision"),
    "vissl",
)
"""The add-ons of phasetrain, each of which may be deleted."""

# Not without those that cannot be loaded: their tests have to fail.
MISSING_ADDONS = set(OWN_ADDONS) - {addon.name for addon in load_addons() if not addon.is_deleted}

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_OPERATORS = declared_operators()  # operators live as long as the library object

# For each phase of each test, pytest adds a handler to each of the 40 loggers of torch that do not
# propagate; that takes longer than all else that it does for a test.
for _logger in list(logging.root.manager.loggerDict.values()):
    if isinstance(_logger, logging.Logger):
        _logger.propagate = True

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has about one core: threads of several workers on the same cores wait for each
    # other at every parallel region.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


class Turnstile:
    """Lets a serial test run while no other worker of pytest-xdist runs any test."""

    def __init__(self) -> None:
        # Two things that exist and that all workers can lock; nothing has to be removed later.
        self._queue = os.open(Path(__file__).parent, os.O_RDONLY)
        self._room = os.open(__file__, os.O_RDONLY)

    @contextmanager
    def enter(self, *, alone: bool) -> Iterator[None]:
        """Wait for the machine, and keep it during one test."""
        # A serial test waits in the queue with the queue locked, so that the others cannot start
        # one test after another while it waits.
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)


TURNSTILE = pytest.StashKey[Turnstile]()


def pytest_configure(config: pytest.Config) -> None:
    """Restore default signal handling; open the turnstile of a worker of pytest-xdist."""
    # The key with which runs sign their custom code does not go into the home of the developer.
    os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"phasetrain-{os.getuid()}"))
    # nohup starts a program with SIGHUP ignored, a shell script its background jobs with SIGINT
    # ignored, and both are inherited by the processes that tests start: phasetrain respects an
    # ignored SIGHUP, and the tests that send these signals would wait for nothing.
    for number, handler in (
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        config.stash[TURNSTILE] = Turnstile()


# First, so that pytest-timeout does not count the time that a test waits for others.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `serial` while no other test runs."""
    turnstile = item.config.stash.get(TURNSTILE, None)
    if turnstile is None:
        return (yield)
    with turnstile.enter(alone=item.get_closest_marker("serial") is not None):
        return (yield)


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow, before options such as -m deselect tests, and skip tests of add-ons that
    are not installed."""
    for item in items:
        for marker in item.iter_markers("addon"):
            names = marker.args or OWN_ADDONS
            assert set(names) <= set(OWN_ADDONS), f"{item.nodeid}: addon{names} names no add-on"
            if missing := sorted(MISSING_ADDONS.intersection(names)):
                item.add_marker(pytest.mark.skip(reason=f"add-on {', '.join(missing)} is missing"))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("by_default") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in cases.values():
        mark_other_cases_slow(members)


def mark_other_cases_slow(members: list[pytest.Item]) -> None:
    """Mark the cases of a parametrized test that its marker `by_default` does not choose."""
    marker = members[0].get_closest_marker("by_default")
    assert marker
    if isinstance(marker.args[0], int):
        others = members[marker.args[0] :]
    else:
        chosen = {f"{members[0].nodeid.partition('[')[0]}[{case}]" for case in marker.args}
        others = [item for item in members if item.nodeid not in chosen]
        # Cases of parts do not exist without the add-on of the part.
        is_chosen = len(members) - len(others) == len(chosen) or len(members) < len(chosen)
        assert is_chosen or MISSING_ADDONS, (
            f"{members[0].nodeid}: by_default names a case that does not exist"
        )
    for item in others:
        item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without collecting garbage, which takes a fifth of the time and finds
    next to nothing; then take all of it out of the collector's sight: a run that collects looks at
    all it sees."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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


@pytest.fixture
def snapshot() -> Callable[[], dict[str, Any]]:
    """Return the function that looks at global state, for the test of the guard below."""
    return global_state


@pytest.fixture(scope="session", autouse=True)
def kept_results() -> None:
    """Keep what runs compute again and again."""
    # Not before: a module that cannot be imported has to fail tests, not this file.
    from caches import keep_results

    keep_results()


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
