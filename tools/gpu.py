"""Run what a machine with a GPU can prove, in groups of their own, and keep the results.

    python tools/gpu.py [--out DIR] [--minutes M] [--only GROUP ...] [--emulated]

Each group is a process with a time limit. Its result is a line of `results.jsonl` in the folder,
written before the next group starts, and its output is in `GROUP.log`; both are packed in
`results.tar.gz`. A group that has passed is not run again, so the same command continues after a
lost machine. The most telling groups come first. `--emulated` is a dry run on the emulated device
of the tests; it skips groups that start processes or measure.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = "tests/end_to_end"

FACTS = """
import json, platform, torch
properties = torch.cuda.get_device_properties(0)
print(json.dumps({
    "device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version(), "python": platform.python_version(),
    "devices": torch.cuda.device_count(), "memory_bytes": properties.total_memory,
}))
"""

EMULATED_SLOWER = 5
"""Factor of time limits in a dry run, perhaps on a busy machine."""

EMULATED = """
import sys; sys.path.insert(0, "tests/end_to_end")
from emulated_cuda import emulate_cuda
with emulate_cuda():
"""


@dataclass(frozen=True)
class Group:
    """Tests or a command that run in one process.

    Attributes:
        name: of the line in results.jsonl.
        seconds: time limit.
        words: arguments of pytest, or of Python if the first one is `-c` or `-m`.
        needs_device: whether the emulated device is not enough.
    """

    name: str
    seconds: float
    words: tuple[str, ...]
    needs_device: bool = False


CERTIFY = ("-m", "phasetrain", "certify", "--quick", "MACHINE.device=cuda")
PROCESSES = f"{TESTS}/test_cuda_processes.py"

GROUPS = (
    Group("facts", 60, ("-c", FACTS)),
    Group("waits", 120, ("tests/testing/test_sync.py",)),
    Group("resume_fp32", 180, (f"{TESTS}/test_cuda.py", "-k", "fp32 or pinned")),
    Group("resume_fp16", 180, (f"{TESTS}/test_cuda.py", "-k", "fp16")),
    Group("resume_bf16", 180, (f"{TESTS}/test_cuda.py", "-k", "bf16")),
    Group("averages", 240, (f"{TESTS}/test_averaged.py",)),
    Group("prefetch", 120, ("tests/data/loading/test_device_prefetch.py",)),
    Group("mixing", 120, ("tests/addons/vision/batch_transforms/test_cuda.py",)),
    Group("features", 150, (f"{TESTS}/test_cuda_features.py",)),
    Group("certify", 300, CERTIFY, needs_device=True),
    Group("profiling", 180, ("tests/addons/observe/profiling",), needs_device=True),
    Group("nccl_fp32", 300, (PROCESSES, "-k", "fp32"), needs_device=True),
    Group("nccl_fp16", 300, (PROCESSES, "-k", "fp16"), needs_device=True),
    Group("nccl_agree", 180, (PROCESSES, "-k", "agree"), needs_device=True),
    Group("compiled", 240, (PROCESSES, "-k", "compiled or checkpointing"), needs_device=True),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the groups that have not passed, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all groups")
    parser.add_argument("--only", nargs="*", default=[], metavar="GROUP")
    parser.add_argument("--emulated", action="store_true", help="dry run without a GPU")
    flags = parser.parse_args(arguments)
    flags.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * flags.minutes
    passed = {row["group"] for row in read_results(flags.out) if row["state"] == "passed"}
    for group in GROUPS:
        is_chosen = not flags.only or group.name in flags.only
        if not is_chosen or group.name in passed or (flags.emulated and group.needs_device):
            continue
        left = end - time.monotonic()
        if left <= 0:
            print(f"{group.name:12} not run: no time is left; run the same command again")
            continue
        limit = EMULATED_SLOWER * group.seconds if flags.emulated else group.seconds
        row = run_group(group, flags.out, min(limit, left), emulated=flags.emulated)
        with open(flags.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write("\n" * (file.tell() > 0) + json.dumps(row))
            file.flush()
            os.fsync(file.fileno())
        print(
            f"{group.name:12} {row['state']:10} {row['seconds']:6.1f} s  {row['last']}", flush=True
        )
    with tarfile.open(flags.out / "results.tar.gz", "w:gz") as packed:
        for path in sorted([*flags.out.glob("*.log"), flags.out / "results.jsonl"]):
            if path.exists():
                packed.add(path, path.name)
    last = {row["group"]: row["state"] for row in read_results(flags.out)}
    return int(not last or any(state != "passed" for state in last.values()))


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    path = folder / "results.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text("utf-8").splitlines():
        # A machine that is lost while it writes leaves half a line.
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def run_group(group: Group, folder: Path, seconds: float, *, emulated: bool) -> dict[str, Any]:
    """Run a group in a session of its own, and return its result."""
    log = folder / f"{group.name}.log"
    paths = os.pathsep.join([str(ROOT), str(ROOT / TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    began = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            make_command(group, emulated=emulated),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            state = "passed" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            state = "timeout"
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return {
        "group": group.name,
        "state": state,
        "emulated": emulated,
        "seconds": round(time.monotonic() - began, 1),
        "last": lines[-1] if lines else "",
    }


def make_command(group: Group, *, emulated: bool) -> list[str]:
    """Return the command line of a group."""
    first, *rest = group.words
    if first == "-c":
        lines = rest[0].strip().splitlines()
        text = rest[0]
        if emulated:
            text = EMULATED + "".join(f"    {line}\n" for line in lines)
        return [sys.executable, "-c", text]
    if first == "-m":
        return [sys.executable, *group.words]
    # The options of pyproject.toml without those that select; no plugins that a bare machine lacks.
    options = ["-o", "addopts=--import-mode=importlib", "-W", "default", "-q", "-m", "gpu"]
    plugins = ["-p", "no:cacheprovider", *(["-p", "emulated_cuda.plugin"] if emulated else [])]
    return [sys.executable, "-m", "pytest", *options, *plugins, *group.words]


if __name__ == "__main__":
    sys.exit(main())
