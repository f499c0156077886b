"""Peak memory of a resume, compared with a fresh start.

    python benchmarks/resume_memory.py [--megabytes 225] [--processes 1 2] [--json FILE]

An MLP with AdamW whose checkpoint has the given size in MB trains two epochs of two updates. It is
stopped after the first epoch, resumed, and trained once without a stop. Each row is a rank: the
highest resident memory (VmHWM of Linux) of both, and their ratio. The rehearsal is off, because it
only takes place at a fresh start.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PARTS = '''
import os
from pathlib import Path

from phasetrain.hooks import HOOKS, Hook


@HOOKS.register("peak")
class Peak(Hook):
    """Writes the peak memory of this process in MB, and stops after the first epoch if asked."""

    main_only = False
    observe_only = True

    def on_phase_end(self, run, phase, metrics):
        if phase.is_train and "STOP" in os.environ:
            run.stop("measured", interrupted=True)

    def on_end(self, run):
        status = Path("/proc/self/status").read_text()
        kilobytes = int(status.partition("VmHWM:")[2].split()[0])
        Path(f"{os.environ['PEAKS']}-{run.world.rank}").write_text(str(kilobytes / 1000))
'''


def measure(megabytes: float, processes: int, scratch: Path) -> list[dict[str, float]]:
    """Return the peak in MB of a fresh start and of a resume, and their ratio, for each rank."""
    (scratch / "peak_parts.py").write_text(PARTS)
    # The hidden layer of width n has n * n weights, and Adam three numbers of 4 bytes for each.
    width = round((megabytes * 1e6 / 12) ** 0.5)
    words = [
        *("RUN.imports=[peak_parts]", "RUN.rehearse=false", "HOOKS.peak={}", "HOOKS.console=null"),
        *(f"MODEL={{name: mlp, hidden: [{width}, {width}]}}", "OPTIMIZER={name: AdamW, lr: 0.001}"),
        *("PHASES.epochs=2", "PHASES.limit={train: 2, test: 1}", "MACHINE.threads=1"),
    ]
    whole, stopped = scratch / f"whole-{processes}", scratch / f"stopped-{processes}"
    train([*words, f"RUN.dir={whole}"], processes, scratch, whole)
    train([*words, f"RUN.dir={stopped}"], processes, scratch, stopped, STOP="1")
    train([*words, f"RUN.dir={stopped}"], processes, scratch, stopped)
    found = []
    for rank in range(processes):
        fresh, resumed = (float(Path(f"{one}-{rank}").read_text()) for one in (whole, stopped))
        found.append({"fresh": fresh, "resumed": resumed, "ratio": resumed / fresh})
    return found


def train(words: list[str], processes: int, scratch: Path, peaks: Path, **variables: str) -> None:
    """Train, and let each rank write its peak to the path `peaks` and its number."""
    command = [sys.executable, "-m", "phasetrain"]
    if processes > 1:
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
        command = [sys.executable, "-m", *launcher, "-m", "phasetrain"]
    environment = {"PYTHONPATH": str(scratch), "OMP_NUM_THREADS": "1", "PEAKS": str(peaks)}
    subprocess.run(
        [*command, "experiment=digits", *words],
        # An interrupted run ends with a code of its own.
        check=not variables,
        env={**os.environ, **environment, **variables},
        cwd=scratch,
        capture_output=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=225)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    print(f"{'processes':>9} {'rank':>4} {'fresh MB':>9} {'resumed MB':>10} {'ratio':>6}")
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(options.megabytes, processes, Path(folder))
        found[str(processes)] = rows
        for rank, row in enumerate(rows):
            print(
                f"{processes:9} {rank:4} {row['fresh']:9.0f} {row['resumed']:10.0f} "
                f"{row['ratio']:6.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
