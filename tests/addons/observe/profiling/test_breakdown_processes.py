"""The breakdown on several ranks: rank 0 writes its own figures, and no bit of the run changes."""

import json
from pathlib import Path

import pytest
from harness import SMALL, ledger_bytes, records, status
from processes import Launcher

ON = "HOOKS.breakdown={every_updates: 5}"
ONE = "MACHINE.threads=1"


def assert_breakdown(folder: Path) -> None:
    found = json.loads((folder / "breakdown.json").read_text())
    train = found["splits"]["train"]
    assert (train["steps"], found["flops_per_sample"]) == (15, {"0": 51168})
    made = train["flops_per_second"] * train["seconds"]
    assert made == pytest.approx(51168 * 8 * 15)  # its own third of each batch of 24
    assert sum(part["seconds"] for part in train["parts"].values()) == pytest.approx(
        train["seconds"]
    )
    assert [line["split"] for line in records(folder) if line["kind"] == "breakdown"] == [
        "train",
        "test",
    ] * 3


@pytest.mark.slow
def test_breakdown_changes_no_bit_on_three_ranks(
    launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
) -> None:
    done = launcher.run(tmp_path / "run", 3, *SMALL, ONE, ON)
    assert done.codes == [0, 0, 0], done.outputs
    assert_breakdown(tmp_path / "run")
    assert [line for line in records(tmp_path / "run") if line["kind"] != "breakdown"] == records(
        unbroken_by_three_ranks
    )
    assert status(tmp_path / "run")["digest"] == status(unbroken_by_three_ranks)["digest"]
    assert ledger_bytes(tmp_path / "run") == ledger_bytes(unbroken_by_three_ranks)


@pytest.mark.addon("sharding")
@pytest.mark.slow
def test_breakdown_changes_no_bit_of_sharded_weights(launcher: Launcher, tmp_path: Path) -> None:
    words = (*SMALL, ONE, "DISTRIBUTED.strategy=fsdp")
    assert launcher.run(tmp_path / "run", 3, *words, ON).codes == [0, 0, 0]
    assert_breakdown(tmp_path / "run")
    assert launcher.run(tmp_path / "unbroken", 3, *words).codes == [0, 0, 0]
    assert status(tmp_path / "run")["digest"] == status(tmp_path / "unbroken")["digest"]
    assert [line for line in records(tmp_path / "run") if line["kind"] != "breakdown"] == records(
        tmp_path / "unbroken"
    )
