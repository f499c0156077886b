"""A run that is killed with SIGKILL and resumed, compared with an uninterrupted one.

    python -m venv .venv-peers
    .venv-peers/bin/pip install -c constraints.txt -r benchmarks/requirements-peers.txt
    python benchmarks/resume.py --peers .venv-peers/bin/python [--json FILE]

The training (benchmarks/peers/problem.py) has 640 samples in batches of 16, 3 epochs of 40 updates,
AdamW with a cosine schedule and a checkpoint every 10 updates. It is killed after update 57, in the
middle of epoch 2, and resumed as the framework's documentation says. `random` draws noise in
`__getitem__` and has dropout, `plain` draws nothing after the shuffle; each runs with 0 and 2
loader workers. Each row is also trained twice without a kill; these runs must agree bit for bit, so
that a difference is due to the resume. Everything is recorded with torch hooks rather than reported
by the frameworks.

Recovery is the time from the start of the command to its first update, for fresh and resumed runs:
medians, and the minimum in parentheses. Every trial is a separate process, one at a time. Without
`--peers` only phasetrain runs.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from peers.problem import BATCH, EPOCHS, LR, SAMPLES, SAVE_EVERY, STEPS, UPDATES, WEIGHT_DECAY

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers"
KILL_AFTER = 57  # updates
LIMIT_SECONDS = 300

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Setting:
    """With or without random numbers after the shuffle, and the number of loader workers."""

    random: bool
    workers: int

    @property
    def name(self) -> str:
        return f"{'random' if self.random else 'plain'} w{self.workers}"


SETTINGS = tuple(Setting(random, workers) for random in (False, True) for workers in (0, 2))


@dataclass(frozen=True)
class Framework:
    """A row: its name, and a function from setting, folder and resume flag to a command."""

    name: str
    command: Callable[[Setting, Path, bool], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)


def phasetrain(setting: Setting, folder: Path, resume: bool) -> list[str]:
    """Return the command for phasetrain, which is the same for a resume."""
    return [
        *(sys.executable, "-m", "phasetrain", "experiment=null", "RUN.imports=[phasetrain_parts]"),
        f"RUN.dir={folder}",
        "DATA.TRAIN.dataset=points",
        f"DATA.TRAIN.random={setting.random}",
        f"DATA.TRAIN.batch_size={BATCH}",
        f"DATA.TRAIN.workers={setting.workers}",
        "DATA.TEST=null",
        "MODEL.name=net",
        f"MODEL.random={setting.random}",
        "OPTIMIZER.name=adamw",
        f"OPTIMIZER.lr={LR}",
        f"OPTIMIZER.weight_decay={WEIGHT_DECAY}",
        "OPTIMIZER.SCHEDULES={lr: {name: cosine}}",
        f"PHASES.epochs={EPOCHS}",
        f"CHECKPOINT.every_updates={SAVE_EVERY}",
        "MACHINE.threads=1",
    ]


def script(python: str, name: str, way: str = "") -> Callable[[Setting, Path, bool], list[str]]:
    """Return the command factory for the script of another framework."""

    def command(setting: Setting, folder: Path, resume: bool) -> list[str]:
        flags = ["--random"] * setting.random + ["--resume"] * resume + [f"--way={way}"] * bool(way)
        return [
            python,
            str(PEERS / name),
            "--folder",
            str(folder),
            "--workers",
            str(setting.workers),
            *flags,
        ]

    return command


def frameworks(python: str | None) -> list[Framework]:
    """Return the rows of the table, including other frameworks if a Python is given."""
    ours = [Framework("phasetrain", phasetrain)]
    if python is None:
        return ours
    unchecked = {
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"
    }  # torch's switch to unpickle as it did before 2.6
    return [
        *ours,
        Framework("Lightning", script(python, "run_lightning.py")),
        Framework("Lightning, StatefulDataLoader", script(python, "run_lightning.py", "stateful")),
        Framework("HF Trainer", script(python, "run_hf_trainer.py")),
        Framework("MMEngine", script(python, "run_mmengine.py")),
        Framework("MMEngine, load patched", script(python, "run_mmengine.py"), unchecked),
        Framework(
            "MMEngine, patched, iterations",
            script(python, "run_mmengine.py", "iterations"),
            unchecked,
        ),
    ]


@dataclass(frozen=True)
class Attempt:
    """Record of one process: samples of each update, and digests of the weights after each."""

    code: int
    seconds_to_update: float | None
    samples: list[list[int]]
    weights: list[str]
    error: str

    @property
    def updates(self) -> int:
        return len(self.samples)

    def did_as(self, other: "Attempt") -> bool:
        """Return whether both reached the same weights with the same samples, update by update."""
        return (self.samples, self.weights) == (other.samples, other.weights)


def attempt(
    framework: Framework,
    setting: Setting,
    folder: Path,
    kill_after: int = 0,
    *,
    resume: bool = False,
) -> Attempt:
    """Run a trial in its folder, which keeps the checkpoints, and return its record."""
    record = folder / f"record-{len(list(folder.glob('record-*')))}.jsonl"
    path = os.pathsep.join([str(ROOT), str(PEERS)])
    asked = {"PYTHONPATH": path, "RESUME_RECORD": str(record), "RESUME_KILL_AFTER": str(kill_after)}
    command = framework.command(setting, folder / "run", resume)
    began = time.monotonic()
    with (folder / "output.txt").open("w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **OFFLINE, **framework.env, **asked},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=LIMIT_SECONDS)
        finally:
            with suppress(
                ProcessLookupError
            ):  # the workers of a process that killed itself, or all that is late
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    return read(record, began, code, text)


def read(record: Path, began: float, code: int, output: str) -> Attempt:
    """Parse the record of an attempt."""
    text = (
        record.read_text("utf-8") if record.exists() else ""
    )  # a process that died early has begun none
    lines = [json.loads(line) for line in text.splitlines()]
    updates = lines[1:]
    return Attempt(
        code,
        updates[0]["seconds"] - began if updates else None,
        [line["samples"] for line in updates],
        [line["weights"] for line in lines],
        error_of(output) if code not in (0, -signal.SIGKILL) else "",
    )


def error_of(output: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line for line in _COLOUR.sub("", output).splitlines() if line.strip()]
    named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    return (named or lines or ["no output"])[-1].strip()[:200]


@dataclass(frozen=True)
class Outcome:
    """Result for one framework in one setting; None if the resume made no update.

    Attributes:
        repeatable: two uninterrupted runs agree; otherwise the comparison is meaningless.
        resumed_at: updates of the checkpoint used for the resume.
        order_exact: every update of the resumed run had the same samples in the same order.
        twice, never: samples of epoch 2 used more than once, or not at all.
        updates: number of updates leading to the final weights.
        equal: the final weights are bit-identical to the uninterrupted run.
        fresh_seconds: from the start of the command to the first update, for each fresh start.
        resumed_seconds: the same for the resume.
    """

    framework: str
    setting: str
    repeatable: bool
    resumed_at: int | None
    order_exact: bool | None
    twice: int | None
    never: int | None
    updates: int | None
    equal: bool | None
    fresh_seconds: list[float]
    resumed_seconds: float | None
    error: str


def outcome(framework: Framework, setting: Setting, folder: Path) -> Outcome:
    """Train twice without interruption, then with a kill and a resume, and compare."""
    whole, again, killed, resumed = trials(framework, setting, folder)
    fresh = [
        found.seconds_to_update for found in (whole, again) if found.seconds_to_update is not None
    ]
    repeatable = whole.did_as(again)
    start = resumed.weights[0] if resumed.updates else None
    if start not in killed.weights:
        error = resumed.error or "went on from weights that the killed run never had"
        return Outcome(
            framework.name,
            setting.name,
            repeatable,
            None,
            None,
            None,
            None,
            None,
            None,
            fresh,
            None,
            error,
        )
    at = killed.weights.index(start)
    samples = killed.samples[:at] + resumed.samples
    twice, never = epoch_two(samples)
    return Outcome(
        framework.name,
        setting.name,
        repeatable,
        at,
        samples == whole.samples,
        twice,
        never,
        len(samples),
        resumed.weights[-1] == whole.weights[-1],
        fresh,
        resumed.seconds_to_update,
        resumed.error,
    )


def trials(
    framework: Framework, setting: Setting, folder: Path
) -> tuple[Attempt, Attempt, Attempt, Attempt]:
    """Return two uninterrupted runs, the killed one, and its resume."""
    for name in ("whole", "again", "killed"):
        (folder / name).mkdir()
    whole = attempt(framework, setting, folder / "whole")
    again = attempt(framework, setting, folder / "again")
    killed = attempt(framework, setting, folder / "killed", KILL_AFTER)
    for found, code, updates in ((whole, 0, UPDATES), (killed, -signal.SIGKILL, KILL_AFTER)):
        if (found.code, found.updates, len(set(found.weights))) != (code, updates, updates + 1):
            raise RuntimeError(
                f"{framework.name}, {setting.name}: expected exit code {code} after {updates} "
                "updates, each with new "
                f"weights, not {found.code} after {found.updates}, {len(set(found.weights))} "
                f"weights: {found.error}"
            )
    return whole, again, killed, attempt(framework, setting, folder / "killed", resume=True)


def epoch_two(samples: list[list[int]]) -> tuple[int, int]:
    """Return how many samples of epoch 2 were used more than once, and never."""
    seen = Counter(index for batch in samples[STEPS:-STEPS] for index in batch)
    return sum(count > 1 for count in seen.values()), SAMPLES - len(seen)


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a table with one row per framework, and errors as notes."""
    head = ["framework", "resumed at", "data order", "twice", "never", "updates"]
    head += [setting.name for setting in SETTINGS] + ["fresh s", "resumed s"]
    rows = [head, ["---"] * len(head)]
    names = list(dict.fromkeys(found.framework for found in outcomes))
    rows += [row([found for found in outcomes if found.framework == name]) for name in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in rows]
    errors = [
        f"{name}: {error}"
        for name, error in dict.fromkeys((f.framework, f.error) for f in outcomes)
        if error
    ]
    unlike = [
        f"{f.framework}, {f.setting}: two whole runs differ" for f in outcomes if not f.repeatable
    ]
    return "\n".join(
        [
            *text,
            "",
            *errors,
            *(unlike or ["Every whole run was equal to its repetition, bit for bit."]),
        ]
    )


def row(found: list[Outcome]) -> list[str]:
    """Return the cells of a framework; if its settings differ, all words or the range."""
    fresh = [seconds for each in found for seconds in each.fresh_seconds]
    resumed = [each.resumed_seconds for each in found if each.resumed_seconds is not None]
    return [
        found[0].framework,
        span(each.resumed_at for each in found),
        distinct(yes(each.order_exact, "exact", "wrong") for each in found),
        span(each.twice for each in found),
        span(each.never for each in found),
        span(each.updates for each in found),
        *(yes(each.equal) or "crash" for each in found),
        *(
            f"{median(seconds):.1f} ({min(seconds):.1f})" if seconds else "-"
            for seconds in (fresh, resumed)
        ),
    ]


def yes(value: bool | None, true: str = "yes", false: str = "no") -> str | None:
    """Return yes, no, or `-` for None."""
    return None if value is None else true if value else false


def distinct(words: Iterable[str | None]) -> str:
    """Return a common word once, or all words if they differ; `-` stands in for None."""
    found = [word or "-" for word in words]
    return found[0] if len(set(found)) == 1 else ", ".join(found)


def span(numbers: Iterable[int | None]) -> str:
    """Return a common number, or `min..max` if they differ; `-` if there are none."""
    found = [number for number in numbers if number is not None]
    if not found:
        return "-"
    return str(found[0]) if len(set(found)) == 1 else f"{min(found)}..{max(found)}"


def measure(rows: list[Framework]) -> list[Outcome]:
    """Run all trials, alternating between frameworks in each setting, and print progress."""
    outcomes = []
    for setting in SETTINGS:
        for framework in rows:
            with tempfile.TemporaryDirectory(prefix="resume-") as folder:
                outcomes.append(outcome(framework, setting, Path(folder)))
            print(
                f"{framework.name}, {setting.name}: equal {yes(outcomes[-1].equal)}",
                file=sys.stderr,
                flush=True,
            )
    return outcomes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        type=os.path.abspath,
        help="a Python that has benchmarks/requirements-peers.txt",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    outcomes = measure(frameworks(flags.peers))
    print(table(outcomes))
    if flags.json:
        machine = f"{platform.platform()}, {os.cpu_count()} cores"
        about = {
            "python": platform.python_version(),
            "machine": machine,
            "killed_after": KILL_AFTER,
        }
        content = {**about, "rows": [asdict(found) for found in outcomes]}
        flags.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
