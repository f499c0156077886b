"""Costs of running several ranks: steps, saves, and detecting and replacing a lost rank.

    python benchmarks/distributed.py [step] [detect] [save] [restart] [--repetitions 15] [--json
    FILE]

Two processes on this machine with one thread each, over gloo. `step` alternates, in the same two
processes, between a hand-written loop around DistributedDataParallel and phasetrain's `ddp`, and
reports the median ratio. `detect` kills or stops one process and waits for the other to end. `save`
compares how long a checkpoint blocks training under `ddp` and `fsdp`. `restart` kills one process
under torchrun and waits for the first update of the next attempt.
"""

import argparse
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from phasetrain.app.setup import resolve_config
from phasetrain.distributed import Placement, join_process_group
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hooks
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder
from phasetrain.tasks.dry_run import warm_up

FEATURES, HIDDEN, CLASSES = 256, 1024, 720  # 1.0 million parameters
PART = 64  # samples per process and update
UPDATES = 40

MODEL = (
    "DATA.TRAIN.dataset=synthetic",
    f"DATA.TRAIN.input_shape=[{FEATURES}]",
    f"DATA.TRAIN.classes={CLASSES}",
    "DATA.TRAIN.transforms=[]",
    "DATA.TEST=null",
    "MODEL.name=mlp",
    f"MODEL.hidden=[{HIDDEN}]",
    "OPTIMIZER.name=sgd",
    "OPTIMIZER.lr=0.01",
    "OPTIMIZER.momentum=0.9",
    "OPTIMIZER.SCHEDULES=null",
    "METERS=null",
    "MACHINE.threads=1",
    "HOOKS.console=null",
)


def framework(world: Any, updates: int) -> Callable[[], float]:
    """Return a training built from config, builder, plan, task and engine."""
    words = [
        *MODEL,
        f"DATA.TRAIN.samples={2 * PART * updates}",
        f"DATA.TRAIN.batch_size={2 * PART}",
        "PHASES.epochs=1",
    ]
    place = Placement(world.rank, world.size)
    setup = resolve_config(
        [*words, "RUN.dir=unused"], terminal=Terminal(io.StringIO(), live=False), place=place
    )
    builder = Builder(setup.config, setup.machine, world)
    data = builder.data()
    plan = builder.plan(data)
    task = builder.task(builder.parts(data, plan))
    warm_up(task, plan.phases[0])

    def trial() -> float:
        engine = PhaseEngine(task, plan, RunState(), Hooks({}, world), world=world)
        with setup.machine.apply_settings():
            dist.barrier()
            began = time.perf_counter()
            engine.run()
            return time.perf_counter() - began

    return trial


def bare(world: Any, updates: int) -> Callable[[], float]:
    """Return the same training as a hand-written loop."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    inputs = torch.randn(2 * PART * updates, FEATURES)
    targets = torch.randint(CLASSES, (2 * PART * updates,))

    def trial() -> float:
        dist.barrier()
        began = time.perf_counter()
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(1))
        for step in range(updates):
            first = (2 * step + world.rank) * PART
            chosen = order[first : first + PART]
            loss = cross_entropy(model(inputs[chosen]), targets[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - began

    return trial


def step_worker(repetitions: int) -> None:
    """Train both in turn as one of two ranks; rank 0 prints the times."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    place = Placement(rank, 2, rank, address="127.0.0.1", port=port)
    with join_process_group(place, torch.device("cpu"), timeout_seconds=60) as world:
        trials = {"bare": bare(world, UPDATES), "phasetrain": framework(world, UPDATES)}
        taken: dict[str, list[float]] = {name: [] for name in trials}
        for turn in range(repetitions + 2):
            for name, trial in trials.items():
                found = trial() / UPDATES
                if turn > 1:
                    taken[name].append(found)
        if world.is_main:
            print(json.dumps(taken))


def measure_step(repetitions: int) -> dict[str, Any]:
    """Return milliseconds per update for both, and their ratio."""
    processes = start(
        [sys.executable, __file__, "--worker", str(repetitions)], 2, stdout=subprocess.PIPE
    )
    taken = json.loads(processes[0].communicate()[0])
    processes[1].wait()
    ratios = [
        ours / theirs for ours, theirs in zip(taken["phasetrain"], taken["bare"], strict=True)
    ]
    return {
        "bare_ms": 1000 * median(taken["bare"]),
        "phasetrain_ms": 1000 * median(taken["phasetrain"]),
        "ratio": median(ratios),
        "ratio_least_and_most": [min(ratios), max(ratios)],
    }


def measure_detect(
    folder: Path, how: signal.Signals, repetitions: int, timeout: float
) -> dict[str, Any]:
    """Return the seconds from the fault of one rank to the end of the other."""
    seconds = []
    for number in range(repetitions):
        run = folder / f"{how.name}-{number}"
        words = [
            *trained(run, updates=100_000),
            f"DISTRIBUTED.timeout_seconds={timeout}",
            "HOOKS.metrics.every_updates=1",
        ]
        processes = start([sys.executable, "-m", "phasetrain", *words], 2)
        wait_for_updates(run, 20)
        began = time.perf_counter()
        processes[1].send_signal(how)
        processes[0].wait(timeout + 60)
        seconds.append(time.perf_counter() - began)
        processes[1].kill()
        processes[1].wait()
        shutil.rmtree(run)
    return {"seconds": median(seconds), "most": max(seconds)}


def measure_save(folder: Path, repetitions: int) -> dict[str, Any]:
    """Return the milliseconds that a save blocks training, by strategy."""
    found: dict[str, list[float]] = {"ddp": [], "fsdp": []}
    for number in range(repetitions):
        for strategy, stalls in found.items():
            run = folder / f"{strategy}-{number}"
            words = [
                *trained(run, updates=40),
                "MODEL.hidden=[2048,2048]",
                "CHECKPOINT.every_updates=10",
            ]
            for process in start(
                [sys.executable, "-m", "phasetrain", *words, f"DISTRIBUTED.strategy={strategy}"], 2
            ):
                assert process.wait(300) == 0
            status = json.loads((run / "status.json").read_text())
            stalls.append(
                1000 * status["time"]["run"]["save"] / 5
            )  # four on the way and one at the end
            size = (
                sum(file.stat().st_size for file in (run / "checkpoints").rglob("*.safetensors"))
                / 3
            )
            shutil.rmtree(run, ignore_errors=True)
    return {strategy: {"stall_ms": median(stalls)} for strategy, stalls in found.items()} | {
        "megabytes": size / 1e6
    }


def measure_restart(folder: Path, repetitions: int) -> dict[str, Any]:
    """Return the seconds from a kill to the first update of the next attempt under torchrun."""
    seconds = []
    for number in range(repetitions):
        run = folder / f"restart-{number}"
        words = [
            *trained(run, updates=100_000),
            "CHECKPOINT.every_updates=20",
            "HOOKS.metrics.every_updates=1",
        ]
        launch = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "phasetrain"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *words]
        launcher = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        wait_for_updates(run, 50)
        pid = json.loads((run / "owner.json").read_text())["pid"]
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        while (first := first_update_after(run, began)) is None:
            time.sleep(0.02)
        seconds.append(first - began)
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        time.sleep(1.0)  # its processes are sessions of their own, and get SIGTERM from the kernel
        shutil.rmtree(run, ignore_errors=True)
    return {"seconds": median(seconds), "least": min(seconds), "most": max(seconds)}


def trained(run: Path, *, updates: int) -> list[str]:
    """Return the overrides of a run."""
    data = (f"DATA.TRAIN.samples={64 * PART}", f"DATA.TRAIN.batch_size={2 * PART}")
    return [*MODEL, *data, f"RUN.dir={run}", f"PHASES.updates={updates}", "HOOKS.ledger=null"]


def start(
    command: Sequence[str], size: int, stdout: int = subprocess.DEVNULL
) -> list[subprocess.Popen[str]]:
    """Start the processes of one group."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            command,
            stdout=stdout,
            stderr=None if stdout == subprocess.PIPE else subprocess.DEVNULL,
            text=True,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_updates(run: Path, updates: int) -> None:
    """Wait until the run has committed checkpoints or logged this many updates."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        status = (
            json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {}
        )
        if status.get("updates", 0) >= updates or any(
            line["updates"] >= updates for line in lines(run)
        ):
            return
        time.sleep(0.05)
    raise TimeoutError(f"{run} has not come to update {updates}")


def first_update_after(run: Path, moment: float) -> float | None:
    """Return the time of the first update logged after a given time."""
    found = [
        line["time"]["at"]
        for line in lines(run)
        if line["kind"] == "step" and line["time"]["at"] > moment
    ]
    return min(found) if found else None


def main() -> None:
    """Run the selected measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["step", "detect", "save", "restart"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=int)
    asked = parser.parse_args()
    if asked.worker is not None:
        step_worker(asked.worker)
        return
    few = max(1, asked.repetitions // 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Any]] = {
            "step": lambda: measure_step(asked.repetitions),
            "detect": lambda: {
                "killed": measure_detect(folder, signal.SIGKILL, few, 60),
                "stopped, timeout 5 s": measure_detect(folder, signal.SIGSTOP, max(1, few // 2), 5),
            },
            "save": lambda: measure_save(folder, few),
            "restart": lambda: measure_restart(folder, few),
        }
        found = {}
        for part in asked.parts:
            found[part] = parts[part]()
            print(part, json.dumps(found[part], indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
