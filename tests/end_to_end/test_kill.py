"""kill -9 at random moments of the command line: the result is that of an uninterrupted run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from faulty import ONE, Ended, Starter
from harness import SMALL, differences_of_runs, leftovers
from kill_findings import Report
from kill_suite import reports, start_suite

TOOL = Path(__file__).parents[2] / "tools" / "run.py"
RUN = ("PHASES.epochs=4", "CHECKPOINT.every_updates=5")


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start the tool in its own process group."""
    return subprocess.Popen(
        [sys.executable, str(TOOL), f"RUN.dir={folder}", *RUN, *overrides],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    process = start(folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return folder


def attempt(folder: Path) -> int:
    """Return the number of the current attempt, 0 before the first."""
    status = folder / "status.json"
    return int(json.loads(status.read_text())["attempt"]) if status.exists() else 0


def kill_until_done(folder: Path, moments: list[float], *overrides: str) -> int:
    """Kill the run at each moment, in seconds after it opened its folder, then let it finish; return
    the number of kills."""
    kills = 0
    for moment in moments:
        before = attempt(folder)
        process, began = start(folder, *overrides), time.monotonic()
        while (
            process.poll() is None and attempt(folder) == before and time.monotonic() - began < 60
        ):
            time.sleep(0.01)
        time.sleep(moment)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate(timeout=60)
    process = start(folder, *overrides)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return kills


@pytest.mark.feature("97", "re-running the command resumes", "`RUN.resume: auto, must, never`")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_random_moments(uninterrupted: Path, tmp_path: Path, workers: int) -> None:
    moments = [random.Random(workers).uniform(0.0, 0.4) for _ in range(2)]
    assert kill_until_done(tmp_path, moments, f"DATA.TRAIN.workers={workers}") > 0
    assert differences_of_runs(uninterrupted, tmp_path) == []
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_many_random_moments(
    uninterrupted: Path, tmp_path: Path, workers: int, seed: int
) -> None:
    generator = random.Random(f"{workers} {seed}")
    moments = [generator.uniform(0.0, 1.5) for _ in range(3)]
    kill_until_done(tmp_path, moments, f"DATA.TRAIN.workers={workers}")
    assert differences_of_runs(uninterrupted, tmp_path) == []
    assert leftovers(tmp_path) == []


def is_detected(folder: Path, protocol: str, sees: Callable[[Report], bool]) -> bool:
    """Return whether the suite detects a broken protocol in up to eight rounds of 20 kills, which
    hit at random."""
    rounds = (
        start_suite(folder / str(seed), "--alone=0", f"--seed={seed}", protocol)
        for seed in range(8)
    )
    return any(sees(reports([one])[protocol]) for one in rounds)


def kill_after(
    starter: Starter, folder: Path, saves: int, seconds: float, *overrides: str
) -> Ended:
    """Start a run, kill it and its workers some time after its next saves, and return its end."""
    checkpoints = folder / "checkpoints"
    before = set(checkpoints.glob("p*"))
    seen: set[Path] = set()
    pid = starter.start(folder, *overrides)
    while len(seen) < saves and Path(f"/proc/{pid}").exists():
        seen |= set(checkpoints.glob("p*")) - before
        time.sleep(0.002)
    time.sleep(seconds)
    with suppress(ProcessLookupError):  # a moment after the end
        os.killpg(pid, signal.SIGKILL)
    return starter.wait()


def test_kills_at_random_moments_change_no_bit(
    starter: Starter, unbroken: Path, tmp_path: Path
) -> None:
    folder, dice = tmp_path / "run", random.Random(0)
    words = (*SMALL, ONE, "CHECKPOINT.every_updates=1")
    codes = [
        kill_after(
            starter, folder, saves, dice.uniform(0.0, 0.1), *words, f"DATA.TRAIN.workers={workers}"
        ).code
        for saves, workers in ((2, 0), (0, 0), (3, 2))
    ]
    assert -signal.SIGKILL in codes
    assert set(codes) <= {-signal.SIGKILL, 0}
    assert starter.run(folder, *words).code == 0
    assert differences_of_runs(unbroken, folder) == []
    assert leftovers(folder) == []


@pytest.mark.slow
def test_twenty_kills_of_the_suite_change_no_bit(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    suite = start_suite(tmp_path / "suite", "--alone=0", "--kills=20", "sound")
    report = reports([suite])["sound"]
    record_property("summary", report.summary())
    assert report.kills == 20
    assert (report.lost, report.wrong, report.left) == ([], [], [])


@pytest.mark.slow
def test_suite_sees_a_checkpoint_that_is_written_in_place(tmp_path: Path) -> None:
    assert is_detected(tmp_path, "overwrite_in_place", lambda report: bool(report.lost))


@pytest.mark.slow
def test_suite_sees_momentum_that_is_not_restored(tmp_path: Path) -> None:
    assert is_detected(tmp_path, "forget_momentum", lambda report: bool(report.wrong))


@pytest.mark.feature("B1")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_kills(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    halves = [
        start_suite(tmp_path / f"half{seed}", "--kills=500", f"--seed={seed}") for seed in range(2)
    ]
    report = reports(halves)["sound"]
    record_property("summary", report.summary())
    assert report.kills == 1000
    assert (report.lost, report.wrong, report.left) == ([], [], [])
    assert report.places.keys() == {
        "start-up",
        "a resume",
        "training",
        "test",
        "a save",
        "a prune",
        "the end",
    }
    assert report.alone > 20


@pytest.mark.slow
def test_suite_sees_what_is_lost_and_left(tmp_path: Path) -> None:
    broken = ("newest_wins", "start_over", "sweep_nothing", "outlive")
    found = reports([start_suite(tmp_path / "suite", "--kills=100", *broken)])
    assert found["newest_wins"].lost
    assert found["start_over"].lost
    assert any(".tmp-" in name or ".trash-" in name for name in found["sweep_nothing"].left)
    assert any("processes" in name for name in found["outlive"].left)
