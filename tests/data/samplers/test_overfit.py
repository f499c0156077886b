from pathlib import Path

import pytest

from phasetrain.commands.api import run
from phasetrain.data import SAMPLERS
from phasetrain.data.samplers.overfit import OverfitOrder
from phasetrain.errors import ConfigError
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.build import build_run

SHUFFLED = SAMPLERS["shuffled"]()


def test_every_pass_is_the_beginning_of_one() -> None:
    order = OverfitOrder(SHUFFLED, 4, seed=7)
    assert order.samples(10) == 4
    assert order.samples(3) == 3
    first = order(10, 1)[:].tolist()
    assert first == SHUFFLED(10, 7)[:].tolist()[:4]
    assert first == order(10, 2)[:].tolist()
    assert first != SHUFFLED(10, 1)[:].tolist()[:4]


def test_a_run_sees_the_same_batches_in_each_epoch_and_learns_them_by_heart(tmp_path: Path) -> None:
    words = ["PHASES.overfit=2", "PHASES.epochs=3", "DATA.TRAIN.batch_size=16"]
    made = build_run(words)
    ids = [
        [batch.ids.tolist() for (batch,) in made.task.batches(phase, 0)]
        for phase in made.plan.phases[::2]
    ]
    assert [len(epoch) for epoch in ids] == [2, 2, 2]
    assert ids[0] == ids[1] == ids[2]
    assert sum(phase.samples for phase in made.plan.phases if phase.split == "test") == 3 * 355, (
        "tests are whole"
    )
    more = ["PHASES.epochs=40", "DATA.TRAIN.transforms=[]", "PHASES.test_every.epochs=null"]
    result = run([*words, *more, f"RUN.dir={tmp_path}"], terminal=Terminal(live=False))
    assert result.last["train/accuracy"] == 1.0
    assert result.last["test/accuracy"] < 0.9


def test_more_batches_than_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"PHASES.overfit = 100:",
    ):
        build_run(["PHASES.overfit=100"])


def test_not_where_the_data_comes_in_windows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": [1.0], "target": 0}\n')
    data = f"{{dataset: windows, pattern: {tmp_path}/*.jsonl, parameter: files, of: {{dataset: lines}}, batch_size: 1}}"
    with pytest.raises(ConfigError, match="windows"):
        build_run(
            [
                "experiment=null",
                f"DATA={{TRAIN: {data}, TEST: null}}",
                "PHASES={epochs: 1, overfit: 1}",
            ]
        )
