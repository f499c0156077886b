"""CPU seconds where people wait: commands, a mistake, the start of a run, a sweep of small runs.

    python benchmarks/waits.py [--repetitions 5] [--before REVISION] [--peers PYTHON] [--json FILE]

Each row is a process, measured from its start to its end: CPU time of user and system, with all of
its children. The rows take turns; the table shows medians, and their ratio to `import torch` and to
torch with one optimizer, which imports torch._dynamo. All processes use compiled modules, as
installed packages do, and a turn before the first, which compiles those of phasetrain and fills
its caches, does not count. After each turn, the table and FILE have the medians of the turns until
then, so that an interrupted measurement is not lost.

`first update` ends with the first update of the small network on the digits; the bare script does
the same with torch alone, while phasetrain also composes and checks its config, plans, rehearses,
opens its run folder and starts its hooks. `one update` also tests, saves and writes the report.

With `--before`, the files of a git revision are measured next to those of this folder. `--peers` is
a Python that has other frameworks (`requirements-peers.txt`), by default this one; each that cannot
be imported is left out. Without a sweep of their own, 12 of their runs take 12 times `one update`.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]

SWEPT = 12
"""Runs of the sweep."""

SMALL = ["PHASES.epochs=1", "PHASES.limit.train=1", "PHASES.limit.test=1"]

# The hook that ends a run at its first update.
STOP = """
import os
from phasetrain.hooks import HOOKS, Hook

@HOOKS.register("stop_at_first")
class StopAtFirst(Hook):
    def on_update(self, run, phase):
        os._exit(0)
"""

NETWORK = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)

def convolution(channels, width, stride):
    return nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()

model = nn.Sequential(
    *convolution(1, 32, 1), *convolution(32, 64, 2), *convolution(64, 64, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
)
"""

# The same update as phasetrain's default config, by hand.
BARE = f"""
import gzip, os, sys
import numpy as np
{NETWORK}
def read(name, header):
    with gzip.open(os.path.join(sys.argv[1], name)) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)

torch.use_deterministic_algorithms(True)
images = torch.from_numpy(read("digits-images.idx.gz", 16).reshape(-1, 1, 8, 8) / np.float32(16))
labels = torch.from_numpy(read("digits-labels.idx.gz", 8).astype(np.int64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
batch = torch.randperm(len(labels))[:64]
nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
optimizer.step()
os._exit(0)
"""

DATA = f"""
{NETWORK}
images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
data = torch.utils.data.TensorDataset(images, labels)
loader = torch.utils.data.DataLoader(data, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""

PEERS: Mapping[str, tuple[str, str, str]] = {
    "lightning": (
        "import lightning",
        f"""
import lightning as L
{DATA}
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])
    def configure_optimizers(self):
        return optimizer
L.Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False).fit(Module(), loader)
""",
        "import lightning as L; L.Trainer(max_epoch=1)",
    ),
    "accelerate": (
        "from accelerate import Accelerator",
        f"""
from accelerate import Accelerator
{DATA}
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for images, labels in loader:
    accelerator.backward(nn.functional.cross_entropy(model(images), labels))
    optimizer.step()
accelerator.save_state("state")
""",
        "from accelerate import Accelerator; Accelerator(mixed_precison='no')",
    ),
    "ignite": (
        "import ignite.engine",
        f"""
from ignite.engine import create_supervised_trainer
{DATA}
create_supervised_trainer(model, optimizer, nn.functional.cross_entropy).run(loader, max_epochs=1)
""",
        "from ignite.engine import Engine; Engine(print).run([1], max_epoch=1)",
    ),
    "transformers": (
        "from transformers import Trainer",
        f"""
from transformers import Trainer, TrainingArguments
{DATA}
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, images, labels):
        output = self.model(images)
        return nn.functional.cross_entropy(output, labels), output
rows = [dict(images=image, labels=label) for image, label in data]
options = TrainingArguments("trainer", max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
Trainer(Classifier(), options, train_dataset=rows).train()
""",
        "from transformers import TrainingArguments; TrainingArguments('x', learning_rat=1)",
    ),
}
"""Package -> programs: its import, one update, and a misspelt option."""

_IMPORT = re.compile(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A process that is measured.

    Attributes:
        name: name in the table; that of a measured revision has the same one.
        words: its words after the interpreter; `{turn}` becomes the number of the turn.
        fails: whether it ends with an error.
        root: folder of phasetrain.
        python: the interpreter.
        is_warm: whether its modules are compiled already: by other rows, or when a package was
            installed.
    """

    name: str
    words: tuple[str, ...]
    fails: bool = False
    root: Path = ROOT
    python: str = sys.executable
    is_warm: bool = False

    def measure(self, folder: Path, turn: int) -> float:
        """Return its CPU seconds."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.root), str(folder)])}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["PHASETRAIN_CACHE"] = str(folder / "cache")
        command = [self.python, *(word.replace("{turn}", str(turn)) for word in self.words)]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if bool(process.returncode) != self.fails:
            raise RuntimeError(f"{self.name}: {(folder / 'output').read_text()}")
        return usage.ru_utime + usage.ru_stime


def list_rows(root: Path, phases: int, folder: Path) -> list[Row]:
    """Return the rows of phasetrain; `folder` has a finished run in `done`."""
    program = str(root / "tools" / "run.py")
    stop = ["RUN.imports=[stop_at_first]", "HOOKS.stop_at_first={}"]
    values = ",".join(str(number / 100) for number in range(1, SWEPT + 1))

    def make(name: str, *words: str, fails: bool = False, is_warm: bool = False) -> Row:
        return Row(name, (program, *words), fails, root, is_warm=is_warm)

    return [
        make("--help", "--help"),
        make("--version", "--version"),
        make("help OPTIMIZER", "help", "OPTIMIZER"),
        make("completion bash", "completion", "bash"),
        make("schema", "schema"),
        make("runs list", "runs", "list", str(folder)),
        make("runs follow", "runs", "follow", "done"),
        make("report", "report", "done"),
        make("misspelt key", "OPTIMIZER.lrr=1", fails=True),
        make("wrong type", "PHASES.epochs=many", fails=True),
        make("misspelt model", "MODEL.name=smal_cnn", fails=True),
        make("plan", "plan", *SMALL),
        make("first update", *stop, "RUN.dir=first-{turn}"),
        make(
            f"first update, {phases:,} phases",
            *(*stop, f"PHASES.epochs={phases // 2}", "RUN.dir=long-{turn}"),
            is_warm=True,
        ),
        make("one update", *SMALL, "RUN.dir=run-{turn}"),
        make(
            f"sweep of {SWEPT} runs",
            *("-m", *SMALL, f"OPTIMIZER.lr={values}", "hydra.sweep.dir=sweep-{turn}"),
            is_warm=True,
        ),
    ]


def list_peer_rows(python: str) -> list[Row]:
    """Return the rows of the frameworks that a Python can import."""
    rows = []
    for package, (imports, update, mistake) in PEERS.items():
        probe = subprocess.run([python, "-c", imports], capture_output=True, check=False)
        if probe.returncode:
            print(f"left out, since it cannot be imported: {package}", file=sys.stderr)
            continue
        rows += [
            Row(f"{package}: import", ("-c", imports), python=python, is_warm=True),
            Row(
                f"{package}: misspelt option",
                ("-c", mistake),
                fails=True,
                python=python,
                is_warm=True,
            ),
            Row(f"{package}: one update", ("-c", update), python=python, is_warm=True),
        ]
    return rows


def list_references() -> list[Row]:
    """Return the rows that others are compared with."""
    optimizer = "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)"
    digits = str(ROOT / "phasetrain" / "data" / "datasets")
    return [
        Row("python", ("-c", "pass"), is_warm=True),
        Row("import torch", ("-c", "import torch"), is_warm=True),
        Row("torch with an optimizer", ("-c", optimizer), is_warm=True),
        Row("bare script to the first update", ("-c", BARE, digits), is_warm=True),
    ]


def measure(
    groups: Mapping[str, list[Row]], repetitions: int, folder: Path
) -> Iterator[dict[str, list[float]]]:
    """Yield `group: name` -> seconds of each turn, after each turn."""
    seconds: dict[str, list[float]] = {}
    for turn in range(repetitions + 1):
        for group, rows in groups.items():
            for row in rows:
                if turn == 0 and row.is_warm:
                    continue
                spent = row.measure(folder, turn)
                print(f"{turn} {group}: {row.name}: {spent:.2f} s", file=sys.stderr, flush=True)
                if turn:
                    seconds.setdefault(f"{group}: {row.name}", []).append(spent)
        if turn:
            yield seconds


def list_imports(folder: Path) -> list[tuple[str, float]]:
    """Return the seconds that a run of one update spends in importing each package, longest first;
    without those of the packages that it imports."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    program = [str(ROOT / "tools" / "run.py"), *SMALL, "RUN.dir=imports"]
    command = [sys.executable, "-X", "importtime", *program]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    spent: Counter[str] = Counter()
    for microseconds, module in _IMPORT.findall(done.stderr):
        package = module.partition(".")[0]
        is_standard = package in sys.stdlib_module_names
        spent["standard library" if is_standard else package] += int(microseconds)
    return [(package, total / 1e6) for package, total in spent.most_common(10)]


def extract_revision(revision: str, folder: Path) -> Path:
    """Return a folder with the files of a git revision."""
    root = folder / "before"
    root.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision], capture_output=True, check=True
    )
    subprocess.run(["tar", "x", "-C", str(root)], input=archive.stdout, check=True)
    return root


def print_table(medians: Mapping[str, float]) -> None:
    """Print the medians as a table in Markdown."""
    torch = medians["reference: import torch"]
    optimizer = medians["reference: torch with an optimizer"]
    print("| CPU seconds | before | now | of `import torch` | of torch with an optimizer |")
    print("|---|---|---|---|---|")
    for name, seconds in medians.items():
        if name.startswith("before: "):
            continue
        before = medians.get(name.replace("phasetrain: ", "before: ", 1), 0.0)
        shown = f"{before:.2f}" if before and name.startswith("phasetrain: ") else ""
        ratios = f"{seconds / torch:.2f} | {seconds / optimizer:.2f}"
        print(f"| {name} | {shown} | {seconds:.2f} | {ratios} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--phases", type=int, default=1_000_000)
    parser.add_argument("--before", metavar="REVISION")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose names contain a text")
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stop_at_first.py").write_text(STOP, encoding="utf-8")
        Row("done", (str(ROOT / "tools" / "run.py"), *SMALL, "RUN.dir=done")).measure(folder, 0)
        groups = {"reference": list_references()}
        if flags.before:
            root = extract_revision(flags.before, folder)
            groups["before"] = list_rows(root, flags.phases, folder)
        groups["phasetrain"] = list_rows(ROOT, flags.phases, folder)
        groups["peer"] = list_peer_rows(flags.peers)
        for group in ("before", "phasetrain", "peer"):
            rows = groups.get(group, [])
            groups[group] = [row for row in rows if any(text in row.name for text in flags.only)]
        imports = list_imports(folder)
        for seconds in measure(groups, flags.repetitions, folder):
            medians = {name: median(spent) for name, spent in seconds.items()}
            print_table(medians)
            if flags.json:
                content = {
                    "python": platform.python_version(),
                    "median": medians,
                    "seconds": seconds,
                    "imports": dict(imports),
                }
                flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print("seconds of import in a run of one update, by package")
    for package, spent in imports:
        print(f"  {package:<28} {spent:5.2f}")


if __name__ == "__main__":
    main()
