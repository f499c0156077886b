"""A pruned grid: its updates, the weights of its runs, and its decisions after kills.

27 runs with eta 3 are pruned by halving. The finished runs, and some paused ones after a resume,
are compared with runs that never paused. The same sweep is then killed with SIGKILL at random
moments, alternately the sweep with its run and a run alone, and started again each time.

    python benchmarks/pruning.py
    python benchmarks/pruning.py --kills 5 --out runs/pruning    # resumable

Runs and sweeps are forks of this process, which has imported everything: starting the program
anew would take longer than the training.
"""

import argparse
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import phasetrain
from phasetrain.addons.experiments.sweep.jobs import Job, read_job_records
from phasetrain.addons.experiments.sweep.override_text import SweepOverrides, hash_overrides
from phasetrain.addons.experiments.sweep.prune.pruned_sweep import PrunedSweep
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.addons.experiments.sweep.prune.trial_plan import plan_trial
from phasetrain.addons.experiments.sweep.prune_record import PruneRecord
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.runs.records import process_exists
from phasetrain.runs.view import read_status
from phasetrain.runtime.terminal import Terminal

MONITOR = "test/accuracy"

# 9 epochs of 6 updates with a test after each; dropout and augmentation draw random numbers.
FIXED = (
    "PHASES.epochs=9",
    "PHASES.limit.train=6",
    "MODEL.dropout=0.2",
    "DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}]",
    "MACHINE.threads=1",
    "HOOKS.console=null",
    "HOOKS.report=null",
    "RUN.rehearse=false",
)

GRID = ("OPTIMIZER.lr=0.01,0.1,1", "OPTIMIZER.momentum=0.3,0.6,0.9", "MODEL.width=2,4,8")

SETTINGS = PruneSettings("halving", eta=3, min=1, unit="epochs")


def start(work: Callable[[], int]) -> int:
    """Run a function in a forked process with the exit code that it returns; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = work()
    except BaseException as error:  # noqa: BLE001 - printed here, because `os._exit` does not
        traceback.print_exception(error)
    finally:
        # Without cleanup: buffers and exit handlers are copies of the parent's.
        os._exit(code)
    raise AssertionError


def wait(pid: int) -> int:
    """Return the exit code of a process as a shell reports it."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def train(folder: str, words: Sequence[str]) -> int:
    """Train a run without output, and return its exit code."""
    terminal = Terminal(io.StringIO(), live=False)
    return phasetrain.run([*words, f"RUN.dir={folder}"], terminal=terminal).exit_code


def launch(job: Job, runs: Sequence[tuple[int, Sequence[str]]], pauses: Mapping[str, int]) -> int:
    """Run some runs one after the other, each in a process."""
    for _, swept in runs:
        record = job.make_record(swept)
        words = list(record.overrides)
        at = pauses.get(hash_overrides(record.overrides))
        if at is not None:
            words.append(f"RUN.pause_at={at}")
        pid = start(partial(train, record.folder, words))
        replace(record, pid=pid).write(job.folder)
        replace(record, exit_code=wait(pid)).write(job.folder)
    return 0


def run_sweep(folder: str) -> int:
    """Run the pruned sweep in this process, and return its exit code."""
    os.setpgid(0, 0)  # a kill of the group is one of the sweep and its run
    job = Job(command=(), fixed=FIXED, folder=folder, sweep="benchmark")
    make_plan = partial(plan_trial, config_dir=None)
    sweep = PrunedSweep(job, SETTINGS, MONITOR, make_plan, partial(launch, job), lambda line: None)
    grid = SweepOverrides.read(GRID).list_combinations()
    sweep.prepare(grid, len(grid))
    return sweep.run_grid(grid)


def run_killed(folder: str, kills: int, seconds: float, seed: int) -> int:
    """Run the sweep and kill it at random moments; return the number of kills.

    Args:
        folder: the sweep folder.
        kills: number of kills, which may be more than there is time for.
        seconds: duration of the sweep without kills.
        seed: seed of the moments.
    """
    draw = random.Random(seed)
    done = 0
    pid = start(partial(run_sweep, folder))
    while True:
        end = time.monotonic() + draw.uniform(0, 1.6 * seconds / max(kills, 1))
        while time.monotonic() < end or done >= kills:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                assert os.waitstatus_to_exitcode(status) == 0, "the sweep failed"
                return done
            time.sleep(0.02)
        running = [one.pid for one in read_job_records(folder) if one.exit_code is None]
        alive = [one for one in running if one and process_exists(one)]
        if done % 2 and alive:
            os.kill(alive[0], signal.SIGKILL)
            done += 1
        elif not done % 2:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pid = start(partial(run_sweep, folder))
            done += 1


def read_facts(folder: str) -> dict[str, tuple[str, int, str]]:
    """Return name -> state, updates and digest of the weights of each run."""
    found = {}
    for run in Results.read(folder, MONITOR).runs:
        digest = read_status(Path(folder, run.name)).digest
        found[run.name] = (run.state, run.updates, digest)
    return found


def compare_unpaused(folder: str, others: str, paused: int) -> tuple[int, int]:
    """Return how many runs were compared with ones that never paused, and how many are equal.

    Args:
        folder: the sweep folder.
        others: folder for the runs that never pause, and for paused ones that are resumed.
        paused: number of paused runs to resume and compare, in addition to all finished ones.
    """
    records = {hash_overrides(one.overrides): one for one in read_job_records(folder)}
    facts = read_facts(folder)
    finished = [name for name, (state, _, _) in facts.items() if state == "finished"]
    rest = [name for name in facts if name not in finished]
    equal = 0
    chosen = [*finished, *rest[:: max(1, len(rest) // max(1, paused))][:paused]]
    for name in chosen:
        whole = f"{others}/{name}"
        assert wait(start(partial(train, whole, records[name].overrides))) == 0
        digest = facts[name][2]
        if name in rest:
            copy = f"{others}/{name}-resumed"
            if not Path(copy).exists():
                shutil.copytree(f"{folder}/{name}", copy)
            assert wait(start(partial(train, copy, records[name].overrides))) == 0
            digest = read_status(copy).digest
        equal += digest == read_status(whole).digest != ""
    return len(chosen), equal


def main() -> int:
    """Print the figures, and return 0 if all of them are as promised."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--paused", type=int, default=3, help="paused runs to resume and compare")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--out", default="runs/pruning")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    with tempfile.TemporaryDirectory() as folder:
        train(f"{folder}/run", [*FIXED, "PHASES.epochs=1"])  # imports everything that a run needs
    for name in ("whole", "killed"):
        Path(options.out, name).mkdir(parents=True, exist_ok=True)

    begin = time.monotonic()
    whole = f"{options.out}/whole"
    assert wait(start(partial(run_sweep, whole))) == 0, "the sweep failed"
    seconds = time.monotonic() - begin
    results = Results.read(whole, MONITOR)
    spent = sum(run.updates for run in results.runs)
    grid = sum(run.planned for run in results.runs)
    print(f"{results.title()} ({seconds:.0f} s)", flush=True)
    has_saved = spent <= 0.45 * grid
    print(f"at most 45 % of the updates of the grid: {has_saved}", flush=True)

    compared, equal = compare_unpaused(whole, f"{options.out}/unpaused", options.paused)
    print(
        f"{equal} of {compared} runs have the weights of runs that never paused "
        f"({options.paused} of them were paused, and resumed)",
        flush=True,
    )

    killed = f"{options.out}/killed"
    kills = run_killed(killed, options.kills, seconds, options.seed)
    records = [PruneRecord.read(one) for one in (whole, killed)]
    is_same = records[0] == records[1] and read_facts(whole) == read_facts(killed)
    print(f"after {kills} kills: same decisions, states, updates and weights: {is_same}")
    return 0 if has_saved and equal == compared and is_same else 1


if __name__ == "__main__":
    sys.exit(main())
