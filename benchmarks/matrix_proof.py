"""What `matrix.py` proves in each environment: a killed and resumed run equals an uninterrupted one.

    python benchmarks/matrix_proof.py FOLDER [CASE ...]

Each case trains twice in FOLDER: once to the end, and once with a SIGKILL in the middle of a phase
and the same command again, with other dataloader workers. Weights, `metrics.jsonl` without times
and the ledger have to be equal. Prints one JSON object: per case the digest of the weights and what
differs. Needs no more than phasetrain itself, whose commands it calls.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix_hook import VARIABLE

HERE = Path(__file__).parent
LIMIT_SECONDS = 600
KILL_AFTER = 7  # updates; the newest checkpoint then has 5

COMMON = (
    "RUN.imports=[matrix_hook]",
    "HOOKS.kill_at={}",
    "HOOKS.report=null",
    "CHECKPOINT.every_updates=5",
    "MACHINE.threads=1",
    # Digests of machines with and without AVX-512 can be compared.
    *(["MACHINE.cpu_capability=AVX2"] if platform.machine() == "x86_64" else []),
)

CASES: Mapping[str, tuple[str, ...]] = {
    "digits": ("PHASES.epochs=1",),
    "text": ("experiment=text_tiny", "PHASES.updates=12", "MODEL.dropout=0.1"),
    "two processes": ("PHASES.updates=12", "DATA.TRAIN.batch_size=32"),
}
"""Name -> overrides: a network with batch norm and SGD, a transformer with dropout and AdamW, DDP."""


def run(folder: Path, case: str, *words: str, kill_after: int = 0) -> str:
    """Train a case in a folder.

    Args:
        folder: the run folder.
        case: name of the case.
        words: more overrides.
        kill_after: number of the update after which the run is killed; 0: none.

    Returns:
        What is wrong with the end of the command, or an empty text.
    """
    start = [sys.executable, "-m"]
    if case == "two processes":
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    if kill_after:
        env[VARIABLE] = str(kill_after)
    done = subprocess.run(
        [*start, "phasetrain", *COMMON, *CASES[case], f"RUN.dir={folder}", *words],
        cwd=folder.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if (done.returncode == 0) == (kill_after == 0):
        return ""
    return f"exit code {done.returncode}: {done.stdout[-1500:]}"


def read_metrics(folder: Path) -> list[Any]:
    """Return the lines of `metrics.jsonl` without their times."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines if line]
    return [{key: value for key, value in one.items() if key != "time"} for one in records]


def compare(whole: Path, resumed: Path) -> list[str]:
    """Return what differs between two run folders."""
    status = [json.loads((folder / "status.json").read_text()) for folder in (whole, resumed)]
    found = []
    if status[1]["attempt"] != 2:
        found.append("the run was not killed")
    if status[0]["digest"] != status[1]["digest"]:
        found.append("weights")
    if read_metrics(whole) != read_metrics(resumed):
        found.append("metrics.jsonl")
    if (whole / "steps.ledger").read_bytes() != (resumed / "steps.ledger").read_bytes():
        found.append("steps.ledger")
    return found


def prove(folder: Path, case: str) -> dict[str, Any]:
    """Return the digest of a case, and what is wrong (`problems`)."""
    name = case.replace(" ", "-")
    whole, resumed = folder / f"{name}-whole", folder / f"{name}-resumed"
    for error in (
        run(whole, case),
        run(resumed, case, kill_after=KILL_AFTER),
        run(resumed, case, "DATA.TRAIN.workers=1"),
    ):
        if error:
            return {"digest": "", "problems": [error]}
    digest = json.loads((whole / "status.json").read_text())["digest"]
    return {"digest": digest, "problems": compare(whole, resumed)}


def main() -> None:
    """Print the results of the cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    folder = given.folder.resolve()
    print(json.dumps({case: prove(folder, case) for case in given.cases}, indent=1))


if __name__ == "__main__":
    main()
