"""False verdicts and power of `phasetrain judge`.

    python benchmarks/judge.py [--repetitions 2000] [--identical 100] [--planted 10] [--folder DIR]

Three parts:
1. Noise of known size, judged as runs are, with the cap of 12 pairs and with 30: changes without
   effect and planted effects. Prints the share of false verdicts and the power.
2. Real short runs on Fashion-MNIST with changes that must change no bit: renamed modules, other
   workers, comments, keys of the YAML in another order, hooks, checkpoints. All have to be identical.
3. Real short runs on Fashion-MNIST with effects of known size: every contender has other initial
   weights, and gives a wrong class for a larger or smaller share of the test samples than the
   baseline. Prints the verdicts on each size.

The data: apt-get install dataset-fashion-mnist. Runs are kept in the folder, so that the command
continues after a kill.
"""

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "commands" / "judge"))

from phasetrain.addons.experiments.judge.judge import Settings, judge  # noqa: E402
from phasetrain.addons.experiments.judge.judgement import Judgement  # noqa: E402
from phasetrain.addons.experiments.judge.processes import WorkingFolder  # noqa: E402
from phasetrain.addons.experiments.judge.sequential import Rule, Verdict, decide  # noqa: E402

EFFECTS = (0.5, 1.0, 2.0, 4.0)
"""Planted effects, in standard deviations of a paired difference."""

CAPS = (12, 30)

BASE = {
    "PHASES": {"epochs": 1, "limit": {"train": 120}},
    "OPTIMIZER": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0001},
    "DATA": {"TRAIN": {"transforms": "${DATA.TEST.transforms}"}},
    "RUN": {"rehearse": False, "imports": []},
    "MACHINE": {"threads": 1},
    "HOOKS": {"report": None},
}

WRONG = 0.08
"""Share of the test samples for which the baseline gives a wrong class on purpose."""

PLANTED = (0.04, 0.06, 0.075, 0.08, 0.085, 0.1, 0.12)
"""The same of contenders. A share that is smaller by x improves the accuracy by x times the accuracy
of the network alone, which is about 0.8 here."""

NET = """
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, classes: int, wrong: float = 0.08, draws: int = 0) -> None:
        super().__init__()
        nn.init.uniform_(nn.Parameter(Tensor(draws)))  # changes the initial weights
        self.FIRST = nn.Linear(784, 32)
        self.SECOND = nn.Linear(32, classes)
        self.wrong = wrong

    def forward(self, images: Tensor) -> Tensor:
        scores = self.SECOND(self.FIRST(images.flatten(1)).relu())
        if self.training:
            return scores
        chosen = (images.flatten(1).double().sum(1).abs() * 1e4) % 1 < self.wrong
        return scores.roll(1, dims=1).where(chosen[:, None], scores)
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
    lines = ["defaults: [fashion, _self_]"]
    sections = list(config)
    rng.shuffle(sections)
    for section in sections:
        keys = list(config[section])
        rng.shuffle(keys)
        lines.append(f"{section}:")
        for key in keys:
            note = f"  # remark {rng.random()}" if comments else ""
            lines.append(f"  {key}: {json.dumps(config[section][key])}{note}")
    path.write_text("\n".join(lines) + "\n")


def write_net(name: str, first: str, second: str, note: str = "") -> str:
    """Write a model with names of its modules, and return its dotted path."""
    text = NET.replace("FIRST", first).replace("SECOND", second)
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
        workers = {"workers": 1 + number % 2, "prefetch": 3}
        config["DATA"] = {"TRAIN": BASE["DATA"]["TRAIN"] | workers}
    elif kind == "hooks":
        config["HOOKS"] = {"report": None, "console": None, "metrics": {"every_updates": 2}}
    elif kind == "checkpoints":
        config["CHECKPOINT"] = {"every_updates": 1 + rng.randrange(3), "background": False}
    elif kind == "code comments":
        net = write_net(f"net_{number}", "first", "second", f"# a remark: {rng.random()}\n")
    path = Path(f"change_{number}.yaml")
    write_yaml(path, config, rng, comments=kind == "comments")
    return kind, f"{path} MODEL=null MODEL.name={net}"


def launch(words: Sequence[str], place: WorkingFolder, output: Path) -> int:
    """Launch a run as the tests do, as a fork that need not import torch again."""
    from judge_forks import launch_fork

    return launch_fork(words, place, output)


def judge_quietly(base: str, others: Sequence[str], cap: int) -> Judgement:
    """Judge contenders against a baseline, without a line of output."""
    return judge(
        [base, *others],
        Settings(short=4, most_pairs=cap),
        launch=launch,
        say=lambda line: None,
    )


def measure_identical(base: str, changes: int) -> None:
    """Print the verdicts on changes that must change no bit."""
    counts: dict[str, Counter] = {}
    for start in range(0, changes, 20):
        made = [make_harmless_change(number) for number in range(start, min(start + 20, changes))]
        found = judge_quietly(base, [words for _, words in made], cap=1)
        for (kind, _), trial in zip(made, found.trials, strict=True):
            counts.setdefault(kind, Counter())[str(trial.verdict)] += 1
    print("verdicts on changes without effect")
    for kind, verdicts in counts.items():
        print(f"  {kind}: {dict(verdicts)}", flush=True)


def measure_planted(net: str, shares: Sequence[float], repetitions: int, cap: int) -> None:
    """Print the verdicts on effects of known size, each judged with seeds and weights of its own."""
    print("wrong on purpose | fewer | better | worse | undecided | pairs | mean difference, sd")
    for wrong in shares:
        index = PLANTED.index(wrong)
        verdicts: Counter = Counter()
        differences: list[float] = []
        spent = 0
        for number in range(repetitions):
            seed = 1000 * (repetitions * index + number + 1)
            config = BASE | {"RUN": BASE["RUN"] | {"seed": seed}}
            path = Path(f"seed_{seed}.yaml")
            write_yaml(path, config, random.Random(0))
            words = f"{path} MODEL=null MODEL.name={net}"
            other = f"{words} MODEL.wrong={wrong} MODEL.draws={1 + number}"
            trial = judge_quietly(words, [other], cap).trials[0]
            verdicts[trial.verdict] += 1
            spent += len(trial.pairs)
            differences += [pair.difference for pair in trial.pairs]
        cells = [f"{wrong:.1%}", f"{WRONG - wrong:+.1%}"]
        cells += [str(verdicts[one]) for one in (Verdict.BETTER, Verdict.WORSE, Verdict.UNDECIDED)]
        cells += [f"{spent / repetitions:.1f}"]
        cells += [f"{np.mean(differences):+.4f}, {np.std(differences):.4f}"]
        print(" | ".join(cells), flush=True)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2000, help="judgements per row; 0: none")
    parser.add_argument("--identical", type=int, default=100, help="harmless changes of real runs")
    parser.add_argument("--planted", type=int, default=10, help="real judgements per planted size")
    parser.add_argument(
        "--wrong", type=float, nargs="+", choices=PLANTED, default=PLANTED, help="only these sizes"
    )
    parser.add_argument("--pairs", type=int, default=12, help="cap on the pairs of real runs")
    parser.add_argument("--folder", default="judge-benchmark", help="keeps the real runs")
    flags = parser.parse_args()
    if flags.repetitions:
        measure_synthetic(flags.repetitions)
    if flags.identical or flags.planted:
        Path(flags.folder).mkdir(parents=True, exist_ok=True)
        os.chdir(flags.folder)
        write_yaml(Path("base.yaml"), BASE, random.Random(0))
        net = write_net("net", "first", "second")
        if flags.identical:
            measure_identical(f"base.yaml MODEL=null MODEL.name={net}", flags.identical)
        if flags.planted:
            measure_planted(net, flags.wrong, flags.planted, flags.pairs)


if __name__ == "__main__":
    main()
