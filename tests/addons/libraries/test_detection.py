"""Runs that detect boxes: killed and resumed in a test, on one and on several ranks, with equal mean
average precision."""

import math
from pathlib import Path

import pytest
from detection_parts import WORDS
from harness import (
    REPORT,
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from processes import Launcher

from phasetrain.runs.records import PREDICTIONS

pytestmark = pytest.mark.addon("vision")

RUN = (
    *WORDS,
    *REPORT,
    "MACHINE.threads=1",
    "PHASES.epochs=1",
    "PHASES.limit.train=6",
    "PHASES.limit.test=null",
    "PHASES.train_meters=false",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=6",
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detection") / "run"
    assert train(folder, *RUN).state == "finished"
    return folder


@pytest.mark.feature("meters.dense")
@pytest.mark.addon("report")
def test_killed_test_resumes_with_equal_bits(unbroken: Path, tmp_path: Path) -> None:
    hooks = {"save": SaveEachStep(), "kill": KillAfter(10)}
    run_until_killed(tmp_path, *RUN, hooks=hooks)
    assert train(tmp_path, *RUN).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []
    found = records(tmp_path)[-1]["metrics"]
    assert 0.02 < found["map_mean"] < 0.98
    # The report shows boxes from the test before and after the kill.
    shown = [(folder / PREDICTIONS).read_text() for folder in (unbroken, tmp_path)]
    assert '"boxes"' in shown[0]
    assert shown[0] == shown[1]


# The test has 12 steps. One process makes the first four; several ranks resume it, are killed in
# the tenth, and resume again.
@pytest.mark.feature("meters.dense")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_test_killed_on_one_and_on_several_ranks_ends_with_equal_metrics(
    ranks: int, unbroken: Path, launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_until_killed(folder, *RUN, hooks={"save": SaveEachStep(), "kill": KillAfter(10)})
    words = [*SMALL, *RUN, "HOOKS.save={name: phasetrain.testing.SaveEachStep}"]
    strike = "HOOKS.strike={rank: 1, update: 6, split: test, after: 10}"

    struck = launcher.run(folder, ranks, *words, strike)
    position = newest(folder).manifest.state
    ended = launcher.run(folder, ranks, *words, strike)

    assert struck.codes[1] == -9, struck.outputs
    assert position["phase"] == 1
    assert 4 < position["step"] < 12
    assert ended.codes == [0] * ranks, ended.outputs
    expected = records(unbroken)[-1]["metrics"]
    found = records(folder)[-1]["metrics"]
    names = [name for name in expected if name.startswith(("map", "ordered"))]
    assert len(names) == 6
    assert not any(math.isnan(expected[name]) for name in names)
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
