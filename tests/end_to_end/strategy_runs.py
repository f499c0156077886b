"""Runs under several strategies: their words, and what tests compare."""

from pathlib import Path
from typing import Any

from harness import SMALL, newest, records
from processes import Launcher

ONE = "MACHINE.threads=1"
PARTS = "RUN.imports=[strategy_parts, process_parts]"
EACH = "DISTRIBUTED.bucket_cap_mb=0.00001"
"""A bucket for each parameter: sums over three processes are in the order then in which fairscale
adds them, too."""

# No batch norm and no dropout: what a sample contributes does not depend on the process that it
# falls to.
PLAIN = (*SMALL[:5], *SMALL[-2:], ONE, PARTS, "MODEL.name=crossed", "METERS.loss=null")
SHARPENED = (*PLAIN, "PHASES.epochs=1", "LOSS.name=sharpened", "OPTIMIZER.accumulate=2")


def using(strategy: str) -> tuple[str, ...]:
    return (
        f"DISTRIBUTED.strategy={strategy}",
        *([] if strategy in ("sharded_ddp", "bucketed") else [EACH]),
    )


def finished(launcher: Launcher, folder: Path, size: int, *words: str) -> Path:
    done = launcher.run(folder, size, *words)
    assert (done.codes, done.alive) == ([0] * size, []), done.outputs
    assert "Warning" not in "".join(done.outputs), done.outputs  # of torch or fairscale
    return folder


def trained_state(folder: Path) -> dict[str, Any]:
    task = newest(folder).state["task"]
    return {name: task[name] for name in ("model", "loss", "updater")}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]
