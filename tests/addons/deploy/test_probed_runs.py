"""Features learned without labels separate the digits better than those of a trunk with random
weights."""

import io
from pathlib import Path

import pytest

from phasetrain.addons.deploy.extract.linear_probe import Probed, ProbeSettings, probe
from phasetrain.app.api import run
from phasetrain.runtime.terminal import Terminal

pytestmark = pytest.mark.addon("vision")

PLAIN = ("DATA.TRAIN.transforms=[]", "DATA.TEST.transforms=[]")  # one image instead of two views


def run_quietly(folder: Path, *words: str) -> None:
    given = ("experiment=digits_simclr", f"RUN.dir={folder}/run", *words)
    run(given, terminal=Terminal(io.StringIO(), live=False))


ALL = ProbeSettings("trunk", device="cpu")


def probed(folder: Path, name: str, *words: str, settings: ProbeSettings = ALL) -> Probed:
    out = f"{folder}/{name}"
    run_quietly(
        folder, "RUN.engine=extract", "EXTRACT.layers=[trunk]", f"EXTRACT.dir={out}", *PLAIN, *words
    )
    return probe(f"{out}/train", f"{out}/test", settings)


def test_extracted_features_of_a_run_are_probed(tmp_path: Path) -> None:
    run_quietly(tmp_path, "PHASES.epochs=1", "PHASES.test_every.epochs=null", "HOOKS.ledger=null")
    one = ProbeSettings("trunk", penalties=(1e-2,), device="cpu")
    learned = probed(tmp_path, "learned", settings=one)
    random = probed(tmp_path, "random", "RUN.checkpoint=none", settings=one)
    assert learned.dimensions == random.dimensions == 12
    assert 0.5 < random.linear < 0.8
    assert 0.5 < learned.linear != random.linear


@pytest.mark.feature("probe")
@pytest.mark.slow
@pytest.mark.parametrize("epochs", [20, 60])
def test_simclr_beats_random_weights_by_ten_points(tmp_path: Path, epochs: int) -> None:
    run_quietly(
        tmp_path, f"PHASES.epochs={epochs}", "PHASES.test_every.epochs=null", "HOOKS.ledger=null"
    )
    learned, random = probed(tmp_path, "learned"), probed(tmp_path, "random", "RUN.checkpoint=none")
    assert learned.dimensions == random.dimensions == 12
    assert 0.5 < random.linear < 0.8
    assert learned.linear >= random.linear + 0.1
    assert learned.neighbours[5] >= random.neighbours[5] + 0.1
