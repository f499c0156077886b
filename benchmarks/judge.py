"""False verdicts and power of `phasetrain judge`.

    python benchmarks/judge.py [--repetitions 2000] [--identical 100] [--planted 6] [--folder DIR]

Three parts:
1. Noise of known size, judged as runs are, with the cap of 12 pairs and with 30: 100 changes without
   effect and 60 planted effects, repeated. Prints the share of false verdicts and the power.
2. Real short runs of digits with changes that must change no bit: renamed modules, other workers,
   comments, keys of the YAML in another order, hooks, checkpoints. All have to be identical.
3. Real runs with planted effects (learning rate, width, labels) and with changes of the initial
   weights that are no better and no worse: the verdict on each.

Runs are kept in the folder, so that the command continues after a kill.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "commands" / "judge"))

from phasetrain.commands.judge.judge import Settings, judge  # noqa: E402
from phasetrain.commands.judge.sequential import Rule, Verdict, decide  # noqa: E402

EFFECTS = (0.5, 1.0, 2.0, 4.0)
"""Planted effects, in standard deviations of a paired difference; 15 each make 60."""

CAPS = (12, 30)

BASE = {
    "DATA": {"TRAIN": {"batch_size": 32}, "TEST": {"batch_size": 128}},
    "OPTIMIZER": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0001},
    "PHASES": {"epochs": 1, "limit": {"train": 20}},
    "RUN": {"rehearse": False, "imports": []},
    "MACHINE": {"threads": 1},
    "HOOKS": {"report": None},
}

NET = """
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.FIRST = nn.Linear(64, width)
        self.SECOND = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.SECOND(self.FIRST(images.flatten(1)).relu())
"""


def draw_differences(family: str, rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return differences with mean 0 and standard deviation 1."""
    if family == "normal":
        return rng.standard_normal(size)
    if family == "heavy tails (t, 3 degrees)":
        return rng.standard_t(3, size) / 3**0.5
    if family == "skewed (exponential)":
        return rng.exponential(size=size) - 1
    # Accuracies of about 0.9 over 200 samples, of two runs with little in common.
    scores = rng.binomial(200, 0.9, (2, *size)) / 200
    return (scores[0] - scores[1]) / (2 * 0.09 / 200) ** 0.5


FAMILIES = ("normal", "heavy tails (t, 3 degrees)", "skewed (exponential)", "accuracy of 200")


def measure_synthetic(repetitions: int) -> None:
    """Print false verdicts and power for noise of known size."""
    rng = np.random.default_rng(0)
    print(f"noise of known size, error rate 5 %, {repetitions} judgements each")
    head = ["differences", "pairs", "false", *(f"found {one:g} sd" for one in EFFECTS)]
    print(" | ".join([*head, "wrong sign", "false 'no difference'"]))
    for family in FAMILIES:
        for cap in CAPS:
            noise = draw_differences(family, rng, (repetitions, cap))
            false = np.mean([one is not Verdict.UNDECIDED for one, _ in judge_rows(noise)])
            cells = [family, str(cap), f"{false:.3f}"]
            wrong = 0.0
            for effect in EFFECTS:
                found = judge_rows(draw_differences(family, rng, (repetitions, cap)) + effect)
                counts = Counter(verdict for verdict, _ in found)
                pairs = np.mean([count for _, count in found])
                cells.append(f"{counts[Verdict.BETTER] / repetitions:.2f} in {pairs:.1f}")
                wrong = max(wrong, counts[Verdict.WORSE] / repetitions)
            equal = judge_rows(draw_differences(family, rng, (repetitions, cap)) + 2, margin=2.0)
            same = np.mean([verdict is Verdict.EQUIVALENT for verdict, _ in equal])
            print(" | ".join([*cells, f"{wrong:.4f}", f"{same:.3f}"]), flush=True)


def judge_rows(rows: np.ndarray, margin: float | None = None) -> list[tuple[Verdict, int]]:
    """Return verdict and number of pairs for each row of differences."""
    looks = (decide([(0.0, float(one)) for one in row], Rule(margin=margin)) for row in rows)
    return [(look.verdict, look.count) for look in looks]


def write_yaml(path: Path, config: dict, rng: random.Random, *, comments: bool = False) -> None:
    """Write an experiment with its keys in a random order."""
    lines = ["defaults: [digits, _self_]"]
    sections = list(config)
    rng.shuffle(sections)
    for section in sections:
        keys = list(config[section])
        rng.shuffle(keys)
        lines.append(f"{section}:")
        for key in keys:
            value = str(config[section][key]).replace("'", "").replace("None", "null")
            note = f"  # remark {rng.random()}" if comments else ""
            lines.append(f"  {key}: {value.replace('False', 'false')}{note}")
    path.write_text("\n".join(lines) + "\n")


def write_net(name: str, first: str, second: str, note: str = "", extra: str = "") -> str:
    """Write a model with names of its modules, and return its dotted path."""
    text = NET.replace("FIRST", first).replace("SECOND", second)
    if extra:
        text = text.replace("super().__init__()", f"super().__init__()\n        {extra}")
    Path(f"{name}.py").write_text(note + text)
    return f"{name}.Net"


def make_harmless_change(number: int) -> tuple[str, str]:
    """Write a change that must change no bit; return its kind and its contender."""
    rng = random.Random(number)
    config = {key: dict(value) for key, value in BASE.items()}
    net = "net.Net"
    kinds = ("renamed", "workers", "comments", "order", "hooks", "checkpoints", "code comments")
    kind = kinds[number % len(kinds)]
    if kind == "renamed":
        net = write_net(f"net_{number}", f"a{number}", f"b{rng.randrange(99)}")
    elif kind == "workers":
        train = {"batch_size": 32, "workers": 1 + number % 2, "prefetch": 3}
        config["DATA"] = BASE["DATA"] | {"TRAIN": train}
    elif kind == "hooks":
        config["HOOKS"] = {"report": None, "console": None, "metrics": {"every_updates": 2}}
    elif kind == "checkpoints":
        config["CHECKPOINT"] = {"every_updates": 1 + rng.randrange(3), "background": "false"}
    elif kind == "code comments":
        net = write_net(f"net_{number}", "first", "second", f"# a remark: {rng.random()}\n")
    path = Path(f"change_{number}.yaml")
    write_yaml(path, config, rng, comments=kind == "comments")
    return kind, f"{path} MODEL=null MODEL.name={net}"


PLANTED = (
    ("learning rate / 30", "OPTIMIZER.lr=0.0033", "net.Net", Verdict.WORSE),
    ("learning rate / 10", "OPTIMIZER.lr=0.01", "net.Net", Verdict.WORSE),
    ("width 16 -> 2", "MODEL.width=2", "net.Net", Verdict.WORSE),
    ("width 16 -> 64", "MODEL.width=64", "net.Net", Verdict.BETTER),
    ("a quarter of the samples", "DATA.TRAIN.subset.samples=64", "net.Net", Verdict.WORSE),
    ("other initial weights", "", "drawn.Net", Verdict.UNDECIDED),
    ("other initial weights again", "", "twice.Net", Verdict.UNDECIDED),
)


def measure_real(identical: int, planted: int, cap: int) -> None:
    """Print the verdicts on real changes, of the present folder."""
    from judge_forks import launch_fork

    write_yaml(Path("base.yaml"), BASE, random.Random(0))
    base = f"base.yaml MODEL=null MODEL.name={write_net('net', 'first', 'second')}"
    write_net("drawn", "first", "second", extra="nn.init.uniform_(nn.Parameter(Tensor(3)))")
    write_net("twice", "first", "second", extra="nn.init.uniform_(nn.Parameter(Tensor(7)))")
    counts: dict[str, Counter] = {}
    batch = 20
    for start in range(0, identical, batch):
        changes = [
            make_harmless_change(number) for number in range(start, min(start + batch, identical))
        ]
        began = time.perf_counter()
        found = judge(
            [base, *(words for _, words in changes)],
            Settings(short=4, most_pairs=1),
            launch=launch_fork,
            say=lambda line: None,
        )
        for (kind, _), trial in zip(changes, found.trials, strict=True):
            counts.setdefault(kind, Counter())[str(trial.verdict)] += 1
        print(
            f"{start + len(changes)} harmless changes, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    for kind, verdicts in counts.items():
        print(f"  {kind}: {dict(verdicts)}", flush=True)
    for name, word, net, expected in PLANTED[:planted]:
        began = time.perf_counter()
        words = f"base.yaml MODEL=null MODEL.name={net} {word}".strip()
        found = judge(
            [base, words],
            Settings(short=4, most_pairs=cap),
            launch=launch_fork,
            say=lambda line: None,
        )
        seconds = time.perf_counter() - began
        print(
            f"  {name} ({expected} expected, {seconds:.0f} s): {found.text.splitlines()[1]}",
            flush=True,
        )


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2000, help="judgements per row; 0: none")
    parser.add_argument("--identical", type=int, default=100, help="harmless changes of real runs")
    parser.add_argument("--planted", type=int, default=7, help="changes with an effect, at most 7")
    parser.add_argument("--pairs", type=int, default=12, help="cap on the pairs of real runs")
    parser.add_argument("--folder", default="judge-benchmark", help="keeps the real runs")
    flags = parser.parse_args()
    if flags.repetitions:
        measure_synthetic(flags.repetitions)
    if flags.identical or flags.planted:
        Path(flags.folder).mkdir(parents=True, exist_ok=True)
        os.chdir(flags.folder)
        measure_real(flags.identical, flags.planted, flags.pairs)


if __name__ == "__main__":
    main()
