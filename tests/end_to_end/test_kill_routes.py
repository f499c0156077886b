"""kill -9 of runs that are started in other ways than by a command line with overrides."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kill_findings import Report
from kill_routes import ROUTES
from kill_suite import reports, start_suite

ADDONS = {"export": "deploy", "state_from": "experiments"}
"""Routes that need an add-on."""

RANKS = "ranks"
"""Its attempts start new processes: seconds instead of tenths of a second."""


def kill_route(folder: Path, route: str, *words: str, protocol: str = "sound") -> Report:
    suite = start_suite(folder / "suite", f"--routes={route}", *words, protocol)
    return reports([suite])[f"{route} {protocol}"]


@pytest.mark.feature("B1")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "route",
    [
        pytest.param(name, marks=pytest.mark.addon(ADDONS[name]) if name in ADDONS else ())
        for name in ROUTES
        if name != "plain"
    ],
)
def test_kills_of_a_route_lose_nothing_and_change_no_bit(
    tmp_path: Path, route: str, record_property: Callable[[str, object], None]
) -> None:
    kills = 3 if route == RANKS else 8
    report = kill_route(tmp_path, route, f"--kills={kills}")
    record_property("summary", f"{route}: {report.summary()}")
    assert report.kills == kills
    assert (report.lost, report.wrong, report.left) == ([], [], [])


@pytest.mark.slow
def test_restart_that_deletes_the_old_folder_is_seen(tmp_path: Path) -> None:
    assert kill_route(tmp_path, "restart", "--kills=40", protocol="forget_old").lost


@pytest.mark.slow
def test_run_that_is_not_exact_and_does_not_say_so_is_seen(tmp_path: Path) -> None:
    assert kill_route(tmp_path, "inexact", "--kills=4", protocol="claim_exact").wrong


@pytest.mark.slow
def test_optimizer_state_that_fit_does_not_restore_is_seen(tmp_path: Path) -> None:
    # A rehearsal would find it before the first step.
    assert kill_route(tmp_path, "classes", "--kills=40", protocol="forget_momentum").wrong
