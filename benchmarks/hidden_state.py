"""How many parts with hidden state are found before a kill can hurt, and how many clean parts are not.

    python benchmarks/hidden_state.py [--only TEXT] [--json FILE]

Trains 40 updates with each part of `hidden_state_parts.py`, saving every 5, and prints which parts
end with the code `resume.not_exact`, at which update, and what the comparison costs.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hidden_state_parts import CLEAN, HIDDEN, Part
from torch import nn

from phasetrain.app.api import run
from phasetrain.distributed import World
from phasetrain.errors import PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.hooks.state_watch import HeldState
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, Supervised

WORDS = (
    "PHASES.epochs=2",
    "PHASES.limit.train=20",
    "PHASES.limit.test=1",
    "CHECKPOINT.every_updates=5",
    "RUN.rehearse=true",
    "RUN.verbosity=quiet",
    "HOOKS.report=null",
)


class CountUpdates(Hook):
    """Counts the updates of a run."""

    observe_only = True

    def __init__(self) -> None:
        self.updates = 0

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        """Keep the number of updates."""
        self.updates = run.state.updates


@dataclass(frozen=True)
class Tried:
    """The outcome for a part.

    Attributes:
        name: of the part.
        code: of the error; empty if the run has finished.
        updates: completed updates.
        message: of the error.
    """

    name: str
    code: str
    updates: int
    message: str


def try_part(part: Part, folder: Path, number: int) -> Tried:
    """Train with a part whose module is written into a folder on the path of imports."""
    module = f"{folder.name}_{number}"
    (folder / f"{module}.py").write_text(part.source, encoding="utf-8")
    importlib.invalidate_caches()
    words = [word.format(module=module) for word in part.words]
    hook = CountUpdates()
    code, message = "", ""
    try:
        run(
            [*WORDS, *words, f"RUN.imports=[{module}]", f"RUN.dir={folder}/run{number}"],
            hooks={"count": hook},
        )
    except PhasetrainError as error:
        code, message = error.code, str(error)
    return Tried(part.name, code, hook.updates, message)


class Layer(nn.Linear):
    """A custom layer with an attribute, for `measure_cost`."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0
        self.buffer = torch.zeros(8)


def measure_cost() -> Mapping[str, float]:
    """Return the milliseconds of a comparison for models of 20 and 200 custom layers."""
    costs = {}
    for layers in (20, 200):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
        machine = Machine(torch.device("cpu"))
        parts = Parts(model, nn.CrossEntropyLoss(), {}, None, {}, machine, World(), 0)
        state = HeldState(Supervised(parts), {})
        times = []
        for _ in range(20):
            began = time.perf_counter()
            state.read()
            times.append(time.perf_counter() - began)
        costs[f"{layers} layers"] = 1000 * median(times)
    return costs


def main(words: Sequence[str] | None = None) -> int:
    """Try the parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--json", default="", help="file to write the outcomes to")
    options = parser.parse_args(words)
    outcomes: dict[str, list[Tried]] = {}
    with tempfile.TemporaryDirectory(prefix="hidden_") as folder:
        sys.path.insert(0, folder)
        for kind, parts in (("hidden", HIDDEN), ("clean", CLEAN)):
            outcomes[kind] = []
            for number, part in enumerate(parts):
                if options.only not in part.name:
                    continue
                tried = try_part(part, Path(folder), number + 100 * (kind == "clean"))
                outcomes[kind].append(tried)
                print(f"{kind:6}  {tried.updates:3}  {tried.code:20}  {part.name}", flush=True)
                if tried.code and (kind == "clean" or tried.code != "resume.not_exact"):
                    print(f"        {tried.message}")
    found = sum(bool(tried.code) for tried in outcomes["hidden"])
    alarms = sum(bool(tried.code) for tried in outcomes["clean"])
    print(f"found {found} of {len(outcomes['hidden'])}")
    print(f"false alarms {alarms} of {len(outcomes['clean'])}")
    costs = measure_cost()
    print("; ".join(f"{name}: {cost:.2f} ms per comparison" for name, cost in costs.items()))
    if options.json:
        content = {kind: [asdict(tried) for tried in rows] for kind, rows in outcomes.items()}
        Path(options.json).write_text(json.dumps(content | {"milliseconds": costs}), "utf-8")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
