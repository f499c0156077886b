"""Several processes: one report, and confusions of all samples."""

import json
from pathlib import Path

import pytest
from harness import REPORT, records
from processes import Launcher
from test_faults_processes import WORDS

WHOLE = ("DATA.TEST.batch_size=36", "PHASES.limit.test=null")
TOTAL = 355
"""Samples of the test split, of which no number of processes gets equal shares."""


@pytest.mark.addon("metrics")
@pytest.mark.parametrize("processes", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_confusions_are_those_of_all_processes(
    launcher: Launcher, tmp_path: Path, processes: int
) -> None:
    folder = tmp_path / "run"
    done = launcher.run(folder, processes, *WORDS, *REPORT, "PHASES.epochs=1", *WHOLE)
    assert done.codes == [0] * processes, done.outputs
    (found,) = json.loads((folder / "predictions.json").read_text()).values()
    tests = [
        record
        for record in records(folder)
        if record["kind"] == "phase" and record["split"] == "test"
    ]
    right = sum(row[place] for place, row in enumerate(found["confusion"]))
    total = sum(map(sum, found["confusion"]))
    assert right / total == tests[-1]["metrics"]["accuracy"]
    assert total == TOTAL
    assert 'badge finished">finished<' in (folder / "report.html").read_text()
