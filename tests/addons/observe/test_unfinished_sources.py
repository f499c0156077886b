"""Weights of a run that has not finished come with a warning."""

from pathlib import Path

import pytest

import phasetrain

SMALL = [
    *("PHASES.epochs=1", "PHASES.limit.train=2", "DATA.TEST=null", "HOOKS.report=null"),
    *("RUN.rehearse=false", "MODEL.width=4"),
]


@pytest.mark.parametrize(
    ("words", "path", "told"),
    [
        (["RUN.pause_at=1"], "", True),
        (["RUN.pause_at=1"], "checkpoints/p0000-s00000001", False),
        ([], "", False),
    ],
)
def test_weights_of_an_unfinished_run_are_warned_of(
    words: list[str], path: str, told: bool, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    phasetrain.run([*SMALL, *words, f"RUN.dir={base}"])
    phasetrain.run([*SMALL, f"MODEL.weights={base / path}", f"RUN.dir={tmp_path / 'run'}"])
    log = (tmp_path / "run/log.txt").read_text()
    line = f"the run in {base} has not finished: it is paused at update 1 of 2"
    assert log.count(line) == log.count("has not finished") == told
