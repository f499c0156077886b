"""Runs that take no time: they leave in their folders what a training leaves."""

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from phasetrain.addons.experiments.judge.contenders import FACTS
from phasetrain.addons.experiments.judge.facts import collect_facts, list_versions
from phasetrain.addons.experiments.judge.facts import main as write_facts
from phasetrain.addons.experiments.judge.processes import WorkingFolder
from phasetrain.runs.ledger import LedgerRecord, encode_ledger

UPDATES = 10

cached_facts = lru_cache(collect_facts)


class FakeRuns:
    """A launcher of runs whose accuracy depends on `OPTIMIZER.lr` and the seed.

    Attributes:
        launched: words of the runs, without the folder.
        folders: their working directories.
        noise: standard deviation of the accuracy between runs of different learning rates and one
            seed.
        left: number of runs after which all others fail; None: none fails.
    """

    def __init__(self) -> None:
        self.launched: list[list[str]] = []
        self.folders: list[str] = []
        self.noise = 0.001
        self.left: int | None = None

    def __call__(self, words: Sequence[str], working_folder: WorkingFolder, output: Path) -> int:
        if words[0] == FACTS:
            return write_facts(words[1:])
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                output.write_text("out of memory\n")
                return 1
        given = dict(word.split("=", 1) for word in words if "=" in word)
        folder = Path(given.pop("RUN.dir").strip("'"))
        self.folders.append(working_folder.path)
        self.launched.append([word for word in words[1:] if not word.startswith("RUN.dir")])
        self.write_run(folder, given)
        return 0

    def write_run(self, folder: Path, given: dict[str, str]) -> None:
        """Write the folder of a run."""
        seed = int(given.get("RUN.seed", 0))
        lr = float(given.get("OPTIMIZER.lr", 0.1))
        planned = 2 * UPDATES if given.get("PHASES.epochs") == "2" else UPDATES
        updates = min(int(given.get("RUN.pause_at", planned)), planned)
        state = "finished" if updates == planned else "paused"
        # A schedule over the planned updates acts late, as a decay at the end does.
        records = [
            LedgerRecord(n, 0, n, 4, 0, n, 0, seed, 1.0 + (n > 8) * planned, 0.0, lr)
            for n in range(1, updates + 1)
        ]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "steps.ledger").write_bytes(encode_ledger(records))
        files = {
            "status.json": {"state": state, "updates": updates, "attempt": 1, "digest": f"{lr}"},
            "plan.json": {"updates": planned, "directions": {"accuracy": "larger"}},
            "environment.json": {"processes": 1, **list_versions()},
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        if state == "finished":
            shared = random.Random(seed).gauss(0.8, 0.05)
            own = random.Random(f"{seed} {lr} {planned}").gauss(0, self.noise)
            metrics = {"accuracy": shared + own - (lr - 0.1) ** 2, "loss": lr, "size": 1.0}
            if given.get("METERS.loss") == "null":
                del metrics["loss"]
            line = {
                "kind": "phase",
                "split": "test",
                "epoch": 0,
                "updates": updates,
                "metrics": metrics,
            }
            (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
