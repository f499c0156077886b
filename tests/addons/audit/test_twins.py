"""Scripts of frameworks and their twins with `phasetrain.fit` in `docs/examples/twins`."""

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phasetrain.addons.audit.probe import FOLDER, OPTIONS
from phasetrain.addons.audit.runs import SITE
from phasetrain.addons.audit.trace import Trace, read_traces

TWINS = Path(__file__).parents[3] / "docs" / "examples" / "twins"

PAIRS = {
    "plain": "plain_fit",
    "lightning_trainer": "lightning_fit",
    "hf_trainer": "hf_fit",
    "accelerate_loop": "accelerate_fit",
    "ignite_engine": "ignite_fit",
}
"""Script of a framework -> its twin."""

MODULES = {"lightning_trainer": "lightning", "hf_trainer": "transformers"}
MODULES |= {"accelerate_loop": "accelerate", "ignite_engine": "ignite"}

OPERATORS = Path(__file__).parents[2] / "end_to_end"

START = (
    "import runpy, sys\n"
    "sys.path.insert(0, {folder!r})\n"
    "from operators import declared_operators\n"
    "operators = declared_operators()\n"
    "runpy.run_path({path!r}, run_name='__main__')\n"
)
"""Runs a script, also where torchvision has no operators for this build of torch."""


def train(script: str, folder: Path, **options: int) -> Trace:
    """Run a script in a folder with the probe of the audit, and return what it has recorded."""
    records = folder / f"records-{len(list(folder.glob('records-*')))}"
    records.mkdir(parents=True)
    environment = {**os.environ, FOLDER: str(records), OPTIONS: json.dumps(options)}
    environment |= {"PYTHONPATH": str(SITE), "PHASETRAIN_WARM_START": "0"}
    path = TWINS / f"{script}.py"
    command = [sys.executable, "-c", START.format(folder=str(OPERATORS), path=str(path))]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == (-9 if "kill_at" in options else 0), done.stderr[-2000:]
    return read_traces(records)[0]


@pytest.mark.parametrize("script", PAIRS)
def test_a_twin_has_few_changed_lines(script: str) -> None:
    texts = [TWINS.joinpath(f"{name}.py").read_text() for name in (script, PAIRS[script])]
    lines = difflib.ndiff(*(text.splitlines() for text in texts))
    assert len([line for line in lines if line.startswith("+ ")]) <= 15


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", PAIRS)
def test_a_twin_has_the_losses_of_the_script_and_survives_three_kills(
    script: str, tmp_path: Path
) -> None:
    pytest.importorskip(MODULES.get(script, "torch"))
    twin = PAIRS[script]
    expected = train(script, tmp_path / "script")
    unbroken = train(twin, tmp_path / "unbroken", every=1)
    losses = [[update.losses for update in trace.updates[:20]] for trace in (expected, unbroken)]
    assert losses[0] == losses[1]
    assert len(expected.updates) == len(unbroken.updates) == 40
    # After updates 8, 18 and 29 of the training; each start begins at the last checkpoint.
    for kill_at, workers in ((8, 0), (13, 2), (14, 1)):
        train(twin, tmp_path / "killed", kill_at=kill_at + unbroken.undone, workers=workers)
    last = train(twin, tmp_path / "killed", every=1, workers=2)
    assert 0 < len(last.updates) < 20
    state = [trace.updates[-1].state for trace in (unbroken, last)]
    assert state[0] == state[1]
