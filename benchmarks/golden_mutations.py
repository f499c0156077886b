"""How often `phasetrain golden check` is right about a change of a small project.

    python benchmarks/golden_mutations.py [--neutral 60] [--other 40]

The project is the one of tests/addons/experiments/golden/mutations.py: a model, a loss and a
transform in a file. Neutral mutations move no bit: comments, blank lines, docstrings, reordered
imports, renamed variables, unused functions, equal constants, loader workers, other folders. All
have to be identical. The others change options, the seed, the order of samples, or the arithmetic
of a part. They have to be named with the right update and component, and the changed file or key.
"""

import argparse
import importlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path

ROOT = Path(__file__).parents[1]
for folder in ("golden", "certify"):
    sys.path.insert(0, str(ROOT / "tests" / "addons" / "experiments" / folder))

from forks import launch_fork  # noqa: E402
from mutations import MODULE, NEUTRAL, OTHERS, SOURCE, WORDS, Mutation  # noqa: E402

from phasetrain.addons.experiments.golden.golden import (  # noqa: E402
    check_golden,
    record_golden,
)
from phasetrain.addons.experiments.options import RecordOptions  # noqa: E402
from phasetrain.cli.output import Outcome  # noqa: E402
from phasetrain.errors import PhasetrainError  # noqa: E402
from phasetrain.runtime.terminal import Terminal  # noqa: E402

FILE = "golden.json"


def list_neutral() -> Iterator[Mutation]:
    """Yield changes that move no bit, of all kinds in turn."""
    kinds = [
        iter(NEUTRAL),
        _list_inserted_lines("# A remark.\n"),
        _list_inserted_lines("\n"),
        _list_imports(),
        _list_renamed(),
        _list_unused(),
        _list_constants(),
        (Mutation(f"{count} workers", words=(f"DATA.TRAIN.workers={count}",)) for count in (1, 3)),
        (Mutation(f"folder {n}", words=(f"RUN.dir=runs/{n}",)) for n in "abcdef"),
        (Mutation(f"name {n}", words=(f"RUN.name=run-{n}",)) for n in "abcd"),
    ]
    while kinds:
        for kind in list(kinds):
            mutation = next(kind, None)
            if mutation is None:
                kinds.remove(kind)
            else:
                yield mutation


def list_others() -> Iterator[Mutation]:
    """Yield changes that move bits."""
    yield from OTHERS
    for lr in ("0.01", "0.02", "0.049", "0.0500001", "0.1", "1.0"):
        yield Mutation(f"lr {lr}", "weights", words=(f"OPTIMIZER.lr={lr}",), update=2)
    for seed in range(2, 7):
        yield Mutation(f"seed {seed}", "initial weights", words=(f"RUN.seed={seed}",))
    for size in (16, 23, 25, 32):
        yield Mutation(f"batch {size}", "samples", words=(f"DATA.TRAIN.batch_size={size}",))
    for decay in ("0.1", "1e-4"):
        yield Mutation(f"decay {decay}", "optimizer", words=(f"OPTIMIZER.weight_decay={decay}",))
    for value in ("0.1", "0.89"):
        yield Mutation(f"momentum {value}", "", words=(f"OPTIMIZER.momentum={value}",), update=2)
    for scale in ("2.0001", "1.0", "4.0", "-2.0"):
        yield Mutation(f"loss {scale}", "loss", "math.sqrt(4.0)", scale)
    for scale in ("0.500001", "1.0", "2.0"):
        yield Mutation(f"transform {scale}", "batch", "image * 0.5", f"image * {scale}")
    for name in ("sigmoid", "sin", "square"):
        yield Mutation(f"activation {name}", "output", "torch.relu(", f"torch.{name}(")
    layers = "nn.Linear(64, 16)\n        self.head = nn.Linear(16, classes)"
    for size in (8, 17):
        after = layers.replace("16", str(size))
        yield Mutation(f"width {size}", "initial weights", layers, after)


def _list_inserted_lines(text: str) -> Iterator[Mutation]:
    for line in SOURCE.splitlines(keepends=True):
        # The text is replaced at its first place only.
        if line.strip() and SOURCE.index(line) == SOURCE.rindex(line):
            yield Mutation(f"{text.strip() or 'blank line'} {line.strip()}", "", line, text + line)


def _list_imports() -> Iterator[Mutation]:
    lines = SOURCE.partition("\n\n\n")[0].splitlines(keepends=True)
    lines = [f"{line.rstrip()}\n" for line in lines if line.strip()]
    before = SOURCE.partition("\n\n\n")[0] + "\n"
    for order in islice(permutations(lines), 1, None, 3):
        yield Mutation("imports", "", before, "".join(order))


def _list_renamed() -> Iterator[Mutation]:
    line = "hidden = torch.relu(self.body(image.flatten(1)))\n        output: Tensor = self.head(hidden)"
    for name in ("h", "features", "values", "hidden_values", "layer"):
        yield Mutation(f"variable {name}", "", line, line.replace("hidden", name))


def _list_unused() -> Iterator[Mutation]:
    for name, place in product(("f", "g", "h"), ("class Network", "class Scaled")):
        text = f"def {name}(value: int) -> int:\n    return value + 1\n\n\n"
        yield Mutation(f"function {name}", "", place, text + place)


def _list_constants() -> Iterator[Mutation]:
    for text in ("(1.0 + 1.0)", "4**0.5", "2", "float(2)", "math.fsum([1.5, 0.5])"):
        yield Mutation(f"constant {text}", "", "math.sqrt(4.0)", text)


def is_right(mutation: Mutation, outcome: Outcome, *, is_neutral: bool) -> bool:
    """Return whether the verdict on a mutation is right."""
    content = outcome.content
    if is_neutral:
        return bool(content["verdict"] == "identical")
    changed = content["changed"]
    keys = [word.partition("=")[0] for word in mutation.words]
    is_named = list(changed["config"]) == keys
    is_named &= changed["sources"] == ([MODULE] if mutation.before else [])
    # A momentum changes the state of the optimizer and the weights in one update.
    components = (mutation.component,) if mutation.component else ("optimizer", "weights")
    is_placed = content.get("update") == mutation.update and content["component"] in components
    return bool(content["verdict"] == "different" and is_named and is_placed)


def write(mutation: Mutation) -> None:
    """Write the source of a mutation, and forget the one before."""
    mutation.apply(Path())
    sys.modules.pop(MODULE, None)
    importlib.invalidate_caches()


def main() -> None:
    """Check the mutations, and print the number of right verdicts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--neutral", type=int, default=60)
    parser.add_argument("--other", type=int, default=40)
    arguments = parser.parse_args()
    # Within a second, bytecode of the source before would be taken for its own.
    sys.dont_write_bytecode = True
    silent = Terminal(io.StringIO(), live=False)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        write(Mutation("none"))
        # Forks keep the kernels of this process.
        words = [*WORDS, "MACHINE.cpu_capability=null"]
        record_golden(words, RecordOptions(updates=2, launch=launch_fork), terminal=silent)
        neutral = list(islice(list_neutral(), arguments.neutral))
        others = list(islice(list_others(), arguments.other))
        for label, mutations in (("neutral", neutral), ("other", others)):
            right = 0
            for mutation in mutations:
                write(mutation)
                try:
                    outcome = check_golden(
                        FILE, mutation.words, launch=launch_fork, terminal=silent
                    )
                except PhasetrainError as error:
                    print(f"{label} {mutation.name}: {error}", flush=True)
                    continue
                if is_right(mutation, outcome, is_neutral=label == "neutral"):
                    right += 1
                else:
                    print(f"{label} {mutation.name}: {outcome.text}", flush=True)
            print(f"{label}: {right} of {len(mutations)} verdicts are right", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
