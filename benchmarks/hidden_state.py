"""How many parts with hidden state are found before a kill can hurt, and how many clean parts are not.

    python benchmarks/hidden_state.py [--only TEXT] [--json FILE] [--experiments]

Trains 40 updates with each part of `hidden_state_parts.py`, saving every 5, and prints which parts
end with the code `resume.not_exact`, at which update, and what the comparison costs. With
`--experiments`, trains a few updates of each experiment and recipe instead, none of which hides
state; without their data on files that stand in for it.
"""

import argparse
import importlib
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from hidden_state_parts import CLEAN, HIDDEN, Part

from phasetrain.addons.observe.state_watch import StateWatch
from phasetrain.app.api import run
from phasetrain.app.shorten import shortening_overrides
from phasetrain.errors import PhasetrainError
from phasetrain.hooks import Hook

ROOT = Path(__file__).parents[1]

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


def try_part(part: Part, folder: Path, number: int, more: Sequence[str] = ()) -> Tried:
    """Train with a part whose module is written into a folder on the path of imports."""
    module = f"{folder.name}_{number}"
    (folder / f"{module}.py").write_text(part.source, encoding="utf-8")
    importlib.invalidate_caches()
    words = [word.format(module=module) for word in part.words]
    hook = CountUpdates()
    code, message = "", ""
    try:
        run(
            [*WORDS, *words, *more, f"RUN.imports=[{module}]", f"RUN.dir={folder}/run{number}"],
            hooks={"count": hook},
        )
    except PhasetrainError as error:
        code, message = error.code, str(error)
    return Tried(part.name, code, hook.updates, message)


def list_experiments() -> dict[str, str]:
    """Return name -> words of each experiment, and of the stages of each recipe that add to one."""
    # Tests of the core use this module, and the core has no recipes.
    from phasetrain.addons.experiments.recipes.recipe import read_recipes

    names = [path.stem for path in sorted((ROOT / "configs" / "experiment").glob("*.yaml"))]
    words = {name: f"experiment={name}" for name in names}
    for recipe in read_recipes():
        for variant in recipe.variants.values():
            for stage, text in variant.stages.items():
                name = " ".join(filter(None, (f"{recipe.name}/{variant.name}", stage)))
                words[name] = re.sub(r"\S+=\S*{(?!seed)\w+}\S*", "", shlex.join(text))
    unique = {text.replace("{seed}", "0").strip(): name for name, text in reversed(words.items())}
    return {name: text for text, name in reversed(unique.items())}


def try_experiment(name: str, text: str, folder: Path) -> tuple[Tried, str]:
    """Train a few updates of an experiment with tests, a save after each and a rehearsal; return
    also `stands in` if its data is not here."""
    option = re.search(r"experiment=(\w+)", text)[1]
    tried, data = Tried(name, "", 0, ""), ""
    for path in ("tests/testing", "tests/end_to_end", "tests/rules"):
        sys.path.append(str(ROOT / path))
    from test_configs import files_for

    for data in ("here", "stands in"):
        files = [] if data == "here" else files_for(option, folder / "files")
        hook = CountUpdates()
        try:
            words = [*shlex.split(text), *files]
            words += [*shortening_overrides(words), "CHECKPOINT.every_updates=1"]
            words += ["RUN.rehearse=true", "RUN.verbosity=quiet", "HOOKS.report=null"]
            run([*words, "DATA.TRAIN.workers=0", f"RUN.dir={folder}/run"], hooks={"count": hook})
            return Tried(name, "", hook.updates, ""), data
        except (PhasetrainError, OSError) as error:
            tried = Tried(name, getattr(error, "code", "OSError"), hook.updates, str(error))
            if tried.code == "resume.not_exact":
                break
    return tried, data


def measure_cost(part: Part, folder: Path) -> tuple[float, float]:
    """Return the milliseconds of CPU time that the comparisons take with a part, in two epochs of
    180 updates that save every 50: at the start, and per update."""
    times: list[float] = []

    def time_calls(name: str) -> None:
        call = attrgetter(name)(StateWatch)

        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            result = call(*arguments)
            times.append(time.process_time() - began)
            return result

        setattr(StateWatch, name, timed)

    names = ("open_phase", "begin_phase", "end_step", "check")
    before = {name: attrgetter(name)(StateWatch) for name in names}
    for name in names:
        time_calls(name)
    words = ("DATA.TRAIN.batch_size=8", "PHASES.limit.train=180", "CHECKPOINT.every_updates=50")
    tried = try_part(part, folder, 1000 + len(list(folder.iterdir())), words)
    for name, call in before.items():
        setattr(StateWatch, name, call)
    # The first phase opens and begins.
    return 1000 * sum(times[:2]), 1000 * sum(times[2:]) / tried.updates


def main(words: Sequence[str] | None = None) -> int:
    """Try the parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="parts whose name contains this")
    parser.add_argument("--json", default="", help="file to write the outcomes to")
    parser.add_argument("--experiments", action="store_true", help="experiments and recipes")
    options = parser.parse_args(words)
    if options.experiments:
        return print_experiments(options.only)
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
        costs = [
            measure_cost(part, Path(folder))
            for part in CLEAN
            if part.name in ("hook: a saved counter", "task: a target network in stateful()")
        ]
    found = sum(bool(tried.code) for tried in outcomes["hidden"])
    alarms = sum(bool(tried.code) for tried in outcomes["clean"])
    restored = sum(part.is_restored for part in HIDDEN if options.only in part.name)
    print(f"rejected {found} and restored {restored} of {len(outcomes['hidden'])}")
    print(f"false alarms {alarms} of {len(outcomes['clean'])}")
    start, cost = map(max, zip(*costs, strict=True))
    print(f"{start:.0f} ms at the start, {cost:.3f} ms per update: {cost / 20:.2%} of 20 ms")
    if options.json:
        content = {kind: [asdict(tried) for tried in rows] for kind, rows in outcomes.items()}
        Path(options.json).write_text(json.dumps(content | {"milliseconds": cost}), "utf-8")
    return int(alarms > 0)


def print_experiments(only: str) -> int:
    """Try the experiments and recipes, and print which of them give a false alarm."""
    outcomes = []
    for name, text in list_experiments().items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="hidden_") as folder:
            tried, data = try_experiment(name, text, Path(folder))
        outcomes.append(tried)
        print(f"{tried.updates:3}  {data:9}  {tried.code:20}  {name}", flush=True)
        if tried.code:
            print(f"     {tried.message[:300]}")
    alarms = sum(tried.code == "resume.not_exact" for tried in outcomes)
    trained = sum(not tried.code for tried in outcomes)
    print(f"false alarms {alarms}, trained {trained} of {len(outcomes)}")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
