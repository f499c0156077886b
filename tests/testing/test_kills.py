"""Runs that save at each step and are killed leave what they had, and say nothing."""

from pathlib import Path

import pytest

from phasetrain.checkpoint import Checkpointer
from phasetrain.runtime.storage import Storage
from phasetrain.testing import KillAfter, Killed, SaveEachStep
from phasetrain.testing.kills import run_quietly

WORDS = [
    "PHASES.epochs=1",
    "PHASES.limit.train=3",
    "PHASES.limit.test=2",
    "DATA.TRAIN.batch_size=24",
]


@pytest.mark.by_default(1)
@pytest.mark.parametrize(("steps", "position"), [(4, (1, 1, 3)), (1, (0, 1, 1))])
def test_a_killed_run_has_saved_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, position: tuple[int, int, int]
) -> None:
    with pytest.raises(Killed):
        run_quietly(
            [*WORDS, f"RUN.dir={tmp_path}"], {"save": SaveEachStep(), "kill": KillAfter(steps)}
        )
    loaded = Checkpointer(f"{tmp_path}/checkpoints", Storage()).load_newest()
    assert loaded is not None
    state = loaded.manifest.state
    assert (state["phase"], state["step"], state["updates"]) == position
    result = run_quietly([*WORDS, f"RUN.dir={tmp_path}"])
    assert (result.state, result.updates) == ("finished", 3)
    assert capsys.readouterr() == ("", "")
