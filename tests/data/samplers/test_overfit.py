from pathlib import Path

import pytest
from raising import raises

from phasetrain.app.api import run
from phasetrain.data import SAMPLERS
from phasetrain.data.samplers.overfit import OverfitOrder
from phasetrain.errors import ConfigError
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.build import build_run

SHUFFLED = SAMPLERS["shuffled"]()


def test_every_epoch_is_the_beginning_of_the_same_order() -> None:
    order = OverfitOrder(SHUFFLED, 4, seed=7)
    assert order.samples(10) == 4
    assert order.samples(3) == 3
    first = order(10, 1)[:].tolist()
    assert first == SHUFFLED(10, 7)[:].tolist()[:4]
    assert first == order(10, 2)[:].tolist()
    assert first != SHUFFLED(10, 1)[:].tolist()[:4]


@pytest.mark.feature("12")
def test_run_repeats_the_same_batches_and_overfits_them(tmp_path: Path) -> None:
    words = ["PHASES.overfit=2", "PHASES.epochs=3", "DATA.TRAIN.batch_size=16"]
    made = build_run(words)
    ids = [
        [batch.ids.tolist() for (batch,) in made.task.batches(phase, 0)]
        for phase in made.plan.phases
        if phase.split == "train"
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


def test_more_batches_than_an_epoch_has_are_rejected() -> None:
    with raises(ConfigError, key="PHASES.overfit", given="100"):
        build_run(["PHASES.overfit=100"])


@pytest.mark.addon("sampling")
def test_windows_cannot_be_overfitted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": [1.0], "target": 0}\n')
    data = f"{{dataset: windows, pattern: {tmp_path}/*.jsonl, parameter: files, of: {{dataset: reading_parts.JsonLines}}, batch_size: 1}}"
    with raises(ConfigError, key="DATA.TRAIN.dataset", given="'windows'"):
        build_run(
            [
                "experiment=null",
                f"DATA={{TRAIN: {data}, TEST: null}}",
                "PHASES={epochs: 1, overfit: 1}",
            ]
        )
