"""What pairing by seed gains: variance of paired over unpaired differences between configs on digits.

    python benchmarks/paired_seeds.py [--seeds 20] [--updates 100] [--folder FOLDER] [--json FILE]

Trains a base config and changes of it with the same seeds, and compares the last test accuracy and
test loss of each change with those of the base. `ratio` is the variance of the paired differences
over that of unpaired ones: with 0.1, an unpaired comparison needs ten times as many runs. The
columns `paired` and `unpaired` are seeds per config with which a difference of 0.01 in the accuracy
is found with a probability of 80 %. Finished runs in FOLDER are used again. About one second per
run on a quiet core.
"""

import argparse
import io
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from phasetrain import run
from phasetrain.addons.experiments.statistics import PairedDifference, compare_pairs, count_pairs
from phasetrain.runtime.terminal import Terminal

CHANGES = {
    "lr 0.1 -> 0.09": ("OPTIMIZER.lr=0.09",),
    "lr 0.1 -> 0.05": ("OPTIMIZER.lr=0.05",),
    "lr 0.1 -> 0.01": ("OPTIMIZER.lr=0.01",),
    "momentum 0.9 -> 0.8": ("OPTIMIZER.momentum=0.8",),
    "label smoothing 0.1": ("LOSS.label_smoothing=0.1",),
    "AdamW": ("OPTIMIZER={name: adamw, lr: 0.01}",),
    "no augmentation": ("DATA.TRAIN.transforms=[]",),
    "batch size 32": ("DATA.TRAIN.batch_size=32",),
    "width 32 -> 64": ("MODEL.width=64",),
}
BASE = ("MODEL.width=32", "OPTIMIZER.lr=0.1", "DATA.TRAIN.batch_size=64")
QUIET = (
    "RUN.rehearse=false",
    "HOOKS.console=null",
    "HOOKS.report=null",
    "CHECKPOINT.every_epochs=null",
)
METRICS = ("test/accuracy", "test/loss")
DIFFERENCE = 0.01


def train(folder: Path, words: tuple[str, ...]) -> dict[str, float]:
    """Return the last metrics of a run, which is trained unless it has finished before."""
    result = run([*BASE, *QUIET, *words, f"RUN.dir={folder}"], terminal=Terminal(io.StringIO()))
    return {metric: result.last[metric] for metric in METRICS}


def train_seeds(folder: Path, words: tuple[str, ...], seeds: int) -> dict[str, dict[int, float]]:
    """Return metric -> seed -> its last value."""
    by_seed = {
        seed: train(folder / str(seed), (*words, f"RUN.seed={seed}")) for seed in range(seeds)
    }
    return {metric: {seed: one[metric] for seed, one in by_seed.items()} for metric in METRICS}


def count_unpaired(difference: PairedDifference) -> int | None:
    """Return the seeds per config that an unpaired comparison needs: its variance is larger."""
    std = difference.summary.std or 0.0
    if not difference.variance_ratio:
        return None
    return count_pairs(DIFFERENCE, std / difference.variance_ratio**0.5)


def format_row(name: str, by_metric: dict[str, PairedDifference]) -> str:
    accuracy = by_metric["test/accuracy"]
    cells = [f"{name:<22}"]
    for difference in by_metric.values():
        ratio = difference.variance_ratio
        correlation = difference.correlation
        cells.append(f"{difference.summary.mean:>+9.4f} {difference.summary.std:>8.4f}")
        cells.append("    -     -" if ratio is None else f"{ratio:>6.3f} {correlation or 0:>5.2f}")
    paired = count_pairs(DIFFERENCE, accuracy.summary.std or 0.0)
    cells.append(f"{paired!s:>6} {count_unpaired(accuracy)!s:>8}")
    return " ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)) / str(arguments.updates)
        begin = time.perf_counter()
        words = (f"PHASES.updates={arguments.updates}",)
        base = train_seeds(folder / "base", words, arguments.seeds)
        print(
            f"{arguments.seeds} seeds, {arguments.updates} updates; columns of accuracy, then of loss"
        )
        columns = "     mean       sd  ratio  corr"
        print(f"{'change':<22}{columns}{columns} paired unpaired")
        results = {}
        for number, (name, change) in enumerate(CHANGES.items()):
            other = train_seeds(folder / str(number), (*words, *change), arguments.seeds)
            results[name] = {
                metric: compare_pairs(other[metric], base[metric]) for metric in METRICS
            }
            print(format_row(name, results[name]), flush=True)
        print(f"{time.perf_counter() - begin:.0f} s")
    if arguments.json:
        content = {
            name: {metric: asdict(one) for metric, one in by_metric.items()}
            for name, by_metric in results.items()
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
