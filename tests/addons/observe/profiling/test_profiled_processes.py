"""Runs of several processes with the profiling hooks: the bits stay the same, and the hooks report
rank 0."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, differences_of_runs, newest, records
from processes import Launcher

from phasetrain.testing import differences

ONE = "MACHINE.threads=1"
WATCHED = (
    "HOOKS.activations={every_updates: 4, gradients: true}",
    "HOOKS.memory.every_updates=4",
    "HOOKS.profiler={wait: 2, warmup: 1, active: 2}",
)
FSDP = ("DISTRIBUTED.strategy=fsdp", "DISTRIBUTED.wrap=[features]")


def activation_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in records(folder) if line["kind"] == "activations"]


def differences_of_tasks(one: Path, other: Path) -> list[str]:
    """Return differences of the ledgers and of the task state of two finished runs."""
    found = differences(newest(one).state["task"], newest(other).state["task"], "task")
    return found + differences(
        (one / "steps.ledger").read_bytes(), (other / "steps.ledger").read_bytes(), "ledger"
    )


@pytest.fixture(scope="module")
def watched(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "run"
    done = launcher.run(folder, 3, *SMALL, ONE, *WATCHED)
    assert done.codes == [0, 0, 0], done.outputs
    return folder


@pytest.mark.feature("110")
@pytest.mark.slow
def test_three_watched_ranks_are_bit_identical(
    launcher: Launcher, watched: Path, tmp_path: Path
) -> None:
    assert launcher.run(tmp_path / "plain", 3, *SMALL, ONE).codes == [0, 0, 0]
    assert differences_of_tasks(tmp_path / "plain", watched) == []
    assert [line["updates"] for line in activation_lines(watched)] == [4, 8, 12]
    assert (
        activation_lines(watched)[0]["outputs"].keys()
        == activation_lines(watched)[0]["gradients"].keys()
    )
    assert sorted(path.name for path in (watched / "profile").iterdir()) == [
        "attempt1-u00000005.json.gz",
        "attempt1-u00000005.txt",
    ]
    assert list(json.loads((watched / "memory.json").read_text())["attempts"]) == ["1"]


@pytest.mark.slow
def test_killed_run_with_profiling_hooks_resumes_exactly(
    launcher: Launcher, watched: Path, tmp_path: Path
) -> None:
    strike = (
        "RUN.imports=[process_parts]",
        "HOOKS.strike={rank: 1, update: 7}",
        "CHECKPOINT.every_updates=2",
    )
    assert launcher.run(tmp_path / "broken", 3, *SMALL, ONE, *WATCHED, *strike).codes == [1, -9, 1]
    assert launcher.run(tmp_path / "broken", 3, *SMALL, ONE, *WATCHED, *strike).codes == [0, 0, 0]
    assert differences_of_runs(watched, tmp_path / "broken") == []


@pytest.mark.addon("sharding")
@pytest.mark.slow
def test_sharded_weights_support_activations_but_not_their_gradients(
    launcher: Launcher, tmp_path: Path
) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    words = (*SMALL, ONE, *FSDP, "PHASES.epochs=2")
    assert launcher.run(plain, 3, *words).codes == [0, 0, 0]
    rejected = launcher.run(watched, 3, *words, *WATCHED)
    assert rejected.codes == [2, 2, 2]
    assert "HOOKS.activations.gradients" in rejected.outputs[0]
    done = launcher.run(watched, 3, *words, *WATCHED, "HOOKS.activations.gradients=false")
    assert done.codes == [0, 0, 0], done.outputs
    assert differences_of_tasks(plain, watched) == []
    assert "features.0/mean" in activation_lines(watched)[0]["outputs"]
