"""Programs that stand for phasetrain, so that a sweep takes no time."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from phasetrain.config.addons import find_service
from phasetrain.config.attrdict import AttrDict

# Notes how it was started in its RUN.dir, leaves there what a run leaves, and ends with code 3
# where LOSS=bad.
PROGRAM = """
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[-1].removeprefix("RUN.dir=").strip("'"))
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts.jsonl").open("a") as file:
    file.write(json.dumps(words[:-1]) + "\\n")
if "LOSS=bad" in words:
    print("it diverged")
    sys.exit(3)
found = dict(word.split("=", 1) for word in words if "=" in word)
lr = float(found.get("OPTIMIZER.lr", 0))
accuracy = 1 - abs(lr - 0.3)
(folder / "status.json").write_text(json.dumps(
    {"state": "finished", "updates": 4, "attempt": 1, "time": {"run": {"train": 1.5, "save": 0.5}}}
))
(folder / "plan.json").write_text('{\\n "updates": 4\\n}')
lines = "".join(f"- {word}\\n" for word in words[:-1])
(folder / "config.yaml").write_text(f"CHECKPOINT:\\n  best:\\n    monitor: test/accuracy\\nwords:\\n{lines}")
with (folder / "metrics.jsonl").open("w") as file:
    for updates, value in ((2, accuracy), (4, accuracy - 0.125)):
        line = {"kind": "phase", "split": "test", "epoch": 0, "updates": updates, "metrics": {"accuracy": value}}
        file.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command line of the program above, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    # matplotlib takes longer than the sweep; the test of the plots puts the function back.
    if find_service("write_report") is not None:
        monkeypatch.setattr(
            "phasetrain.addons.experiments.sweep.page.write_charts", lambda charts, folder: []
        )
    (tmp_path / "program.py").write_text(PROGRAM)
    # -S: without site-packages the interpreter starts ten times as fast.
    return [sys.executable, "-S", str(tmp_path / "program.py")]


@pytest.fixture
def settled() -> Callable[[Sequence[str]], AttrDict]:
    """Return a check that composes the config which the program writes."""

    def check(overrides: Sequence[str]) -> AttrDict:
        words = [word for word in overrides if not word.startswith("RUN.dir=")]
        return AttrDict({"CHECKPOINT": {"best": {"monitor": "test/accuracy"}}, "words": words})

    return check
