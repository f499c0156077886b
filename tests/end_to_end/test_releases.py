"""Run folders made by earlier releases: the present code resumes, lists, reports and compares them.

`tests/data/releases/0.1` holds two runs of release 0.1 with the same settings apart from their
length: `finished` (20 updates) and `stopped` (SIGTERM after update 20 of 400).
"""

import io
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from phasetrain.app.api import run
from phasetrain.app.list_runs import list_runs
from phasetrain.app.result import RunResult
from phasetrain.cli import main
from phasetrain.runs.history import read_history
from phasetrain.runs.ledger import FILE, list_differences, parse_ledger
from phasetrain.runtime.terminal import Terminal

RELEASE = Path(__file__).parents[1] / "data" / "releases" / "0.1"
TOOL = Path(__file__).parents[2] / "tools" / "release_folder.py"
SETTINGS: tuple[str, ...] = runpy.run_path(str(TOOL))["SETTINGS"]
"""Overrides with which the folders were made."""
# Release 0.1 printed this digest when it had resumed `stopped` itself and finished it.
DIGEST = "9480f98d3349db01d321c8ac63246916853cbe13ff8a184e86fad0d9c1df9605"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the release's run folders in which the stopped run has been resumed."""
    folder = tmp_path_factory.mktemp("releases")
    shutil.copytree(RELEASE, folder, dirs_exist_ok=True)
    shutil.copytree(folder / "stopped", folder / "resumed")
    assert resume(folder / "resumed", "PHASES.epochs=40").state == "finished"
    return folder


def resume(folder: Path, *overrides: str) -> RunResult:
    """Run the command of the release on a folder."""
    return run(
        [*SETTINGS, *overrides, f"RUN.dir={folder}"], terminal=Terminal(io.StringIO(), live=False)
    )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text("utf-8"))


def is_equal_machine(environment: dict[str, Any]) -> bool:
    """Return whether floating-point results of the release can be expected bit for bit."""
    return (
        environment["torch"] == torch.__version__
        and environment["numpy"] == numpy.__version__
        and environment["switches"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    )


def test_stopped_run_resumes_where_it_stopped(runs: Path) -> None:
    status = read_json(runs / "resumed" / "status.json")
    assert (status["attempt"], status["updates"]) == (2, 400)
    assert len((runs / "resumed" / "attempts.jsonl").read_text().splitlines()) == 1


@pytest.mark.feature(
    "releases", "run folders of earlier releases resume", "[stability.md](stability.md)"
)
def test_resumed_run_has_the_digest_of_the_release(runs: Path) -> None:
    if not is_equal_machine(read_json(RELEASE / "stopped" / "environment.json")):
        pytest.skip("another torch, numpy or CPU than the release ran on")
    assert read_json(runs / "resumed" / "status.json")["digest"] == DIGEST


def test_ledger_of_the_release_is_continued_in_its_version(runs: Path) -> None:
    before, after = (
        parse_ledger((runs / name / FILE).read_bytes()) for name in ("stopped", "resumed")
    )
    assert (before.header.version, after.header.version, len(after)) == (1, 1, 400)
    assert [list_differences(after[number], before[number]) for number in before] == [[]] * 20


def test_metrics_of_both_attempts_are_read_as_one_history(runs: Path) -> None:
    before, after = (read_history(runs / name) for name in ("stopped", "resumed"))
    epochs = after.scalar("test/accuracy")
    assert len(epochs) == 40
    assert epochs[:1] == before.scalar("test/accuracy")


def test_finished_run_stays_finished(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(RELEASE / "finished", tmp_path / "run")
    result = resume(tmp_path / "run", "PHASES.epochs=2")
    assert (result.state, result.exit_code) == ("finished", 0)
    assert read_json(tmp_path / "run" / "status.json")["attempt"] == 1


def test_runs_are_listed(runs: Path) -> None:
    found = {
        Path(one.folder).name: (one.state, one.updates, one.planned) for one in list_runs(str(runs))
    }
    assert found == {
        "finished": ("finished", 20, 20),
        "stopped": ("preempted", 20, 400),
        "resumed": ("finished", 400, 400),
    }


@pytest.mark.addon("experiments")
def test_runs_are_compared(runs: Path) -> None:
    from phasetrain.addons.experiments.compare.compare_runs import compare_runs

    text = compare_runs(str(runs / "finished"), str(runs / "resumed"))
    assert "PHASES.epochs" in text
    assert "test/accuracy" in text


@pytest.mark.addon("report")
@pytest.mark.parametrize("name", ["finished", "stopped", "resumed"])
def test_report_is_written(runs: Path, name: str) -> None:
    page = runs / name / "report.html"
    page.unlink(missing_ok=True)
    assert main(["report", str(runs / name)]) == 0
    assert "test/accuracy" in page.read_text("utf-8")


@pytest.mark.feature(
    "pack.releases", "packed models of earlier releases predict", "[stability.md](stability.md)"
)
@pytest.mark.addon("deploy")
def test_packed_model_of_format_1_predicts() -> None:
    from phasetrain.addons.deploy.pack.load_pack import load_pack

    packed = load_pack(RELEASE.parent / "pack-1.zip")
    expected = [0.0271, 0.1774, 0.0202, -0.0162, 0.3768, -0.0599, 0.2537, -0.1341, -0.0187, 0.1390]
    inputs = torch.arange(64.0).view(1, 1, 8, 8) / 64
    assert packed.predict(inputs)[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert packed.classes == tuple("0123456789")
    if packed.card["versions"]["torch"] == torch.__version__:
        assert packed.verification.difference < 1e-6


@pytest.mark.feature("releases")
@pytest.mark.slow
def test_release_folder_of_this_version_resumes(tmp_path: Path) -> None:
    made = tmp_path / "made"
    subprocess.run([sys.executable, str(TOOL), str(made)], check=True, capture_output=True)
    assert sum(path.stat().st_size for path in made.rglob("*") if path.is_file()) < 300_000
    assert read_json(made / "finished" / "status.json")["updates"] == 20
    assert read_json(made / "stopped" / "environment.json")["host"]["name"] == "host"
    resume(made / "stopped", "PHASES.epochs=40")
    status = read_json(made / "stopped" / "status.json")
    assert (status["attempt"], status["updates"]) == (2, 400)
    assert status["digest"] == read_json(made / "expected.json")["digest"]
