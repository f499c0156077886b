"""Weights that are neither loaded nor trained come with a warning."""

from pathlib import Path

import pytest

import phasetrain

SMALL = ["PHASES.epochs=1", "PHASES.limit.train=1", "DATA.TEST=null"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    phasetrain.run([*SMALL, f"RUN.dir={folder}"])
    return folder


@pytest.mark.parametrize(
    ("words", "warnings"),
    [
        pytest.param(
            ["MODEL.adapters={match: 'features.*', train: [head]}"],
            0,
            marks=pytest.mark.addon("adapters"),
        ),
        pytest.param(
            ["MODEL.adapters={match: 'features.*'}"], 1, marks=pytest.mark.addon("adapters")
        ),
        (["MODEL.freeze=['features.*']"], 0),
        (["MODEL.freeze=['head.*']"], 1),
        (["MODEL.freeze_updates=[{match: 'head.*', for: 1}]", "PHASES.limit.train=2"], 0),
    ],
)
def test_frozen_weights_with_initial_values_are_warned_of(
    words: list[str], warnings: int, base: Path, tmp_path: Path
) -> None:
    weights = f"MODEL.weights={{path: {base}, reinit: ['head.*']}}"
    phasetrain.run([*SMALL, weights, *words, f"RUN.dir={tmp_path}"])
    assert (tmp_path / "log.txt").read_text().count("at random initial values") == warnings
