"""CPU seconds from process start to the first update, compared with a bare script.

    python benchmarks/startup.py [--repetitions 9] [--phases 1000000] [--json FILE]

Both processes read the digits, build the small network and its optimizer, make one update and
report their CPU time so far (user and system, all threads, including the start of the interpreter).
phasetrain also composes and checks its config, plans, opens its run folder and starts its hooks.
They take turns; the output shows medians, and the time of imports per package, excluding other
packages that they import. The third line is phasetrain with many phases: a test after each epoch.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "phasetrain" / "data" / "datasets"

# The hook that stops the clock: the weights have been updated once.
CLOCK = """
import os, sys, time
from phasetrain.hooks import HOOKS, Hook

@HOOKS.register("clock")
class Clock(Hook):
    def on_update(self, run, phase):
        os.write(2, f"CPU {time.process_time()}\\n".encode())
        os._exit(0)
"""

BARE = """
import gzip, os, sys, time
import numpy as np
import torch
from torch import nn

def read(path, header):
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)

torch.manual_seed(0)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
images = torch.from_numpy(read(sys.argv[1] + "/digits-images.idx.gz", 16).reshape(-1, 1, 8, 8) / np.float32(16))
labels = torch.from_numpy(read(sys.argv[1] + "/digits-labels.idx.gz", 8).astype(np.int64))

def convolution(channels, width, stride):
    return nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)

model = nn.Sequential(
    *convolution(1, 32, 1), *convolution(32, 64, 2), *convolution(64, 64, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
order = torch.randperm(len(labels))
chosen = order[:64]
loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
loss.backward()
optimizer.step()
os.write(2, f"CPU {time.process_time()}\\n".encode())
os._exit(0)
"""

_USED = re.compile(r"^CPU ([\d.]+)$", re.MULTILINE)
_IMPORT = re.compile(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", re.MULTILINE)


def cpu_seconds(command: list[str], folder: Path) -> float:
    """Return the CPU time reported by a program."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    found = _USED.search(done.stderr)
    if found is None:
        raise RuntimeError(f"{' '.join(command)} came to no update:\n{done.stdout}{done.stderr}")
    return float(found[1])


def measure(repetitions: int, phases: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of all variants, in turns; the first turn fills the disk cache."""
    (folder / "clock.py").write_text(CLOCK, encoding="utf-8")
    (folder / "bare.py").write_text(BARE, encoding="utf-8")
    many = f"phasetrain, {phases:,} phases"
    taken: dict[str, list[float]] = {"bare script": [], "phasetrain": [], many: []}
    for turn in range(repetitions + 1):
        clock = ["RUN.imports=[clock]", "HOOKS.clock={}", f"RUN.dir={folder / f'run-{turn}'}"]
        bare = cpu_seconds([sys.executable, "bare.py", str(DIGITS)], folder)
        command = [sys.executable, str(ROOT / "tools" / "run.py"), *clock]
        ours = cpu_seconds(command, folder)
        longer = [f"PHASES.epochs={phases // 2}", f"RUN.dir={folder / f'long-{turn}'}"]
        if turn:
            taken[many].append(cpu_seconds([*command, *longer], folder))
            taken["bare script"].append(bare)
            taken["phasetrain"].append(ours)
    return taken


def imports(folder: Path) -> list[tuple[str, float]]:
    """Return the seconds that importing phasetrain spends in each package, longest first."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-c", "import phasetrain.app.engines"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    spent: Counter[str] = Counter()
    for microseconds, module in _IMPORT.findall(done.stderr):
        package = module.partition(".")[0]
        spent["standard library" if package in sys.stdlib_module_names else package] += int(
            microseconds
        )
    return [(package, total / 1e6) for package, total in spent.most_common(12)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--phases", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(flags.repetitions, flags.phases, Path(folder))
        spent = imports(Path(folder))
    medians = {name: median(seconds) for name, seconds in taken.items()}
    above = median(ours - bare for bare, ours, _ in zip(*taken.values(), strict=True))
    print("CPU seconds to the first update")
    for name, seconds in medians.items():
        print(f"  {name:<28} {seconds:5.2f}   ({min(taken[name]):.2f} .. {max(taken[name]):.2f})")
    print(f"  {'above bare':<28} {above:5.2f}")
    print("seconds of import, by package")
    for package, seconds in spent:
        print(f"  {package:<28} {seconds:5.2f}")
    if flags.json:
        content = {
            "python": platform.python_version(),
            "median": medians,
            "above": above,
            "imports": dict(spent),
        }
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
