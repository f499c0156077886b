"""Measure recipes: seeds, minutes, digests, kills, baselines and curves, and write them down.

    python benchmarks/recipes.py NAME[/VARIANT]... [--seeds 5] [--kills 3] [--out runs/measured]

Every seed is run in its own process, and seed 0 is run once more, killed with SIGKILL at random
updates and resumed each time: its weights must be those of the run without kills. The results go
into `configs/recipes/NAME.yaml` below the key `measured`, the tables into `docs/recipes/`, and the
curves next to them. Start the same command again after an interruption: finished seeds are kept
and the others are resumed. The minutes are CPU time, so that they say what a run takes with one
thread on a core of its own, whatever else the machine does. The kernels are those for AVX2, unless
the recipe sets MACHINE.cpu_capability.

`benchmarks/recipe_baselines/NAME.py`, if there is one, prints values to compare with as JSON:
name -> metric -> value.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import takewhile
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from phasetrain.addons.experiments.recipes.pages import curve_file, write_pages
from phasetrain.addons.experiments.recipes.recipe import (
    Variant,
    find_files,
    find_variant,
    read_recipe,
)
from phasetrain.addons.experiments.recipes.requirements import require_packages
from phasetrain.addons.experiments.recipes.run_recipe import run_variant, stage_folder
from phasetrain.app.engines import run_engine
from phasetrain.app.result import RunResult
from phasetrain.config.compose.override_text import key_of
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.runs.history import read_history
from phasetrain.runs.view import read_status

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "recipes"
BASELINES = ROOT / "benchmarks" / "recipe_baselines"


class KillAt(Hook):
    """Kills the process after an update, without any chance to clean up."""

    observe_only = True

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.is_train and run.state.updates == self.updates:
            os.kill(os.getpid(), signal.SIGKILL)


def run_seed(variant: Variant, seed: int, folder: Path, kill: tuple[str, int] | None) -> None:
    """Run a seed in this process, to its end or to a kill, and write result.json.

    Args:
        variant: what to run.
        seed: its seed.
        folder: folder of all stages.
        kill: stage, and update after which the process is killed.
    """

    def run(words: Sequence[str], hooks: Mapping[str, Hook]) -> RunResult:
        own = next(word for word in words if word.startswith("RUN.dir="))
        stage = own.removeprefix(f"RUN.dir={folder}").strip("/")
        extra = dict(hooks)
        if kill is not None and stage == kill[0]:
            extra["kill"] = KillAt(kill[1])
        return run_engine(words, hooks=extra)

    is_resumed = any(folder.rglob("status.json"))
    overrides = [f"RUN.dir={folder}"]
    own = [key_of(word) for words in variant.stages.values() for word in words]
    if "MACHINE.cpu_capability" not in own:
        overrides.append("MACHINE.cpu_capability=AVX2")
    found = run_variant(variant, seed=seed, overrides=overrides, run=run)
    if found.state != "finished":
        sys.exit(found.exit_code or 1)
    if missing := [name for name in variant.metrics if name not in found.metrics]:
        sys.exit(f"{variant.full_name} does not measure {', '.join(missing)}, which its file names")
    cpu_seconds = sum(os.times()[:4])  # of this process and of workers that have ended
    content = {
        "metrics": {name: found.metrics[name] for name in variant.metrics},
        "digest": found.digest,
        "first_epoch": found.first_epoch,
        "platform": found.platform,
        "seconds": None if is_resumed else cpu_seconds,
    }
    (folder / "result.json").write_text(json.dumps(content, indent=1))


def call(variant: Variant, seed: int, folder: Path, kill: tuple[str, int] | None = None) -> int:
    """Run a seed in a new process and return its exit code; a finished seed is kept."""
    if (folder / "result.json").exists():
        return 0
    words = [sys.executable, __file__, variant.full_name, "--one", str(seed), "--out", str(folder)]
    if kill is not None:
        words += ["--kill", f"{kill[0]}:{kill[1]}"]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


def measure_kills(variant: Variant, folder: Path, digest: str, kills: int) -> list[int]:
    """Kill and resume seed 0 at random updates, and return after how many updates in all.

    Raises:
        SystemExit: the weights differ from the weights of the run without kills.
    """
    lengths = {
        stage: read_status(stage_folder(str(folder / "seed0"), stage)).updates
        for stage in variant.stages
    }
    draw = random.Random(variant.full_name)
    totals = sorted(draw.sample(range(1, sum(lengths.values())), kills))
    killed = folder / "killed"
    killed.mkdir(parents=True, exist_ok=True)
    log = killed / "kills.json"
    done = json.loads(log.read_text()) if log.exists() else []
    for total in totals[len(done) :]:
        ends = [0]
        for length in lengths.values():
            ends.append(ends[-1] + length)
        index = len(list(takewhile(lambda end, at=total: end < at, ends))) - 1
        code = call(variant, 0, killed, (list(lengths)[index], total - ends[index]))
        if code != -signal.SIGKILL:
            sys.exit(f"{variant.full_name}: expected a kill after {total} updates, found {code}")
        done.append(total)
        log.write_text(json.dumps(done))
    if code := call(variant, 0, killed):
        sys.exit(code)
    found = json.loads((killed / "result.json").read_text())["digest"]
    if found != digest:
        sys.exit(f"{variant.full_name}: killed after {done} updates: {found} instead of {digest}")
    return done


def measure_variant(variant: Variant, folder: Path, seeds: int, kills: int) -> dict[str, Any]:
    """Run all seeds and kills of a variant, and return its entry of `measured`."""
    results = []
    for seed in range(seeds):
        if code := call(variant, seed, folder / f"seed{seed}"):
            sys.exit(code)
        results.append(json.loads((folder / f"seed{seed}" / "result.json").read_text()))
    draw_curves(variant, folder, seeds)
    first = results[0]
    # A resumed process knows the CPU time of its own part only.
    seconds = [one["seconds"] for one in results if one["seconds"]] or [nan]
    entry = {
        "date": date.today().isoformat(),
        "values": {
            name: [round(one["metrics"][name], 6) for one in results] for name in variant.metrics
        },
        "minutes": round(median(seconds) / 60, 2),
        "digests": [one["digest"] for one in results],
        "first_epochs": [one["first_epoch"] for one in results],
        "platform": first["platform"],
    }
    if kills:
        entry["kills"] = measure_kills(variant, folder, first["digest"], kills)
    return entry


def measure_baselines(name: str, folder: Path) -> dict[str, Any]:
    """Run the script with the baselines of a recipe, if there is one."""
    script = BASELINES / f"{name}.py"
    kept = folder / "baselines.json"
    if not script.exists():
        return {}
    if not kept.exists():
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(done.stdout)
    content = json.loads(kept.read_text())
    assert isinstance(content, dict)
    return content


def draw_curves(variant: Variant, folder: Path, seeds: int) -> None:
    """Write the curve of the first metric, a line per seed, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = variant.full_name  # equal curves give equal files
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 2.7), layout="constrained")
    last = list(variant.stages)[-1]
    for seed in range(seeds):
        points = read_history(stage_folder(str(folder / f"seed{seed}"), last)).scalar(
            variant.metric
        )
        axes.plot(*zip(*points, strict=True), linewidth=1, label=f"seed {seed}")
    axes.set_xlabel("update")
    axes.set_ylabel(variant.metric)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    PAGES.mkdir(exist_ok=True)
    figure.savefig(PAGES / curve_file(variant), metadata={"Date": None})
    pyplot.close(figure)


def write_facts(path: Path, name: str, entry: Mapping[str, Any], baselines: Any) -> None:
    """Write the results of a variant below `measured`, and keep the text above it."""
    text = path.read_text("utf-8")
    head = re.split(r"(?m)^measured:", text, maxsplit=1)[0]
    measured = yaml.safe_load(text).get("measured") or {}
    measured.setdefault("variants", {})[name] = dict(entry)
    if baselines:
        measured["baselines"] = baselines
    body = yaml.safe_dump({"measured": measured}, sort_keys=False, width=100, allow_unicode=True)
    path.write_text(f"{head.rstrip()}\n{body}", "utf-8")


def measure(name: str, out: Path, seeds: int, kills: int) -> None:
    """Measure a variant, or all variants of a recipe, and write down each at once."""
    recipe, variant = find_variant(name)
    require_packages(recipe)
    path = ROOT / "configs" / "recipes" / f"{recipe.name}.yaml"
    variants = [variant] if "/" in name else list(recipe.variants.values())
    for one in variants:
        entry = measure_variant(one, out / recipe.name / one.name, seeds, kills)
        write_facts(path, one.name, entry, measure_baselines(recipe.name, out / recipe.name))
        read_recipe(path)
        write_pages(PAGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME[/VARIANT]")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3, help="kills of seed 0")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "measured")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kill", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one is not None:
        stage, _, updates = (flags.kill or "").rpartition(":")
        kill = (stage, int(updates)) if flags.kill else None
        run_seed(find_variant(flags.names[0])[1], flags.one, flags.out, kill)
        return
    for name in flags.names:
        if name.partition("/")[0] not in find_files():
            parser.error(f"{name}: no such recipe; recipes: {', '.join(find_files())}")
        measure(name, flags.out.absolute(), flags.seeds, flags.kills)


if __name__ == "__main__":
    main()
