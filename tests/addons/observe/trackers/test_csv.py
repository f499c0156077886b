"""Tables hold each step and phase once, after any number of resumes."""

import csv
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, records, run_until_killed, train

from phasetrain.addons.observe.trackers.csv import CSV
from phasetrain.hooks import Hook

WORDS = ("HOOKS.csv.every_updates=1", "HOOKS.report=null", "HOOKS.ledger=null")
DIFFERS = ("at", "samples_per_second")


def table(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a table without what differs between equal runs."""
    with open(folder / "csv" / name, newline="") as file:
        return [
            {key: value for key, value in row.items() if key not in DIFFERS}
            for row in csv.DictReader(file)
        ]


class Late(Hook):
    """Logs a norm from the seventh update on."""

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        if phase.is_train and run.state.updates >= 6:
            out.logs["norm"] = 1.5


@pytest.mark.parametrize("kills", [(9,), pytest.param((3, 12), marks=pytest.mark.slow)])
def test_each_step_and_phase_is_a_row_once(tmp_path: Path, kills: tuple[int, ...]) -> None:
    for steps in kills:
        run_until_killed(tmp_path, *WORDS, hooks={"kill": KillAfter(steps), "late": Late()})
    train(tmp_path, *WORDS, hooks={"late": Late()})
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [
        "test.csv", "train-2.csv", "train-steps-2.csv", "train-steps.csv", "train.csv",
    ]  # fmt: skip
    first, second = table(tmp_path, "train-steps.csv"), table(tmp_path, "train-steps-2.csv")
    assert list(first[0]) == ["updates", "epoch", "phase", "step", "samples", "loss", "lr"]
    assert list(second[0]) == ["updates", "epoch", "phase", "step", "samples", "loss", "lr", "norm"]
    assert [row["updates"] for row in first] == ["1", "2", "3", "4", "5", "6"]
    assert [row["updates"] for row in second] == [str(updates) for updates in range(7, 16)]
    assert {row["norm"] for row in second} == {"1.5"}
    logged = [record for record in records(tmp_path) if record["kind"] == "step"]
    assert [float(row["loss"]) for row in first + second] == [record["loss"] for record in logged]
    assert [row["updates"] for row in table(tmp_path, "test.csv")] == ["5", "10", "15"]
    assert list(table(tmp_path, "train.csv")[0])[-2:] == ["accuracy", "loss"]


def test_a_file_shorter_than_the_checkpoint_covers_goes_on_with_whole_rows(tmp_path: Path) -> None:
    run_until_killed(tmp_path, *WORDS, hooks={"kill": KillAfter(9)})
    file = tmp_path / "csv" / "train-steps.csv"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3]) + b"3,0,")
    train(tmp_path, *WORDS)
    assert [row["updates"] for row in table(tmp_path, "train-steps.csv")] == [
        "1",
        "2",
        *map(str, range(6, 16)),
    ]
    assert "earlier lines are lost" in (tmp_path / "log.txt").read_text()


def test_columns_that_differ_between_equal_runs_come_last() -> None:
    assert CSV(every_updates=3).every_updates == 3
    with pytest.raises(ValueError, match="every_updates = 0"):
        CSV(every_updates=0)
