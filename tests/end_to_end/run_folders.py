"""Run folders as a run writes them, made by hand."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any


def write(
    folder: Path,
    state: str | None = "finished",
    *,
    age: float = 5.0,
    pid: int | None = None,
    **more: Any,
) -> Path:
    """Write what a run with 100 planned updates has written after 40 of them."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text('{\n "name": "x",\n "updates": 100,\n "phases": []\n}')
    (folder / "config.yaml").write_text(
        "CHECKPOINT:\n  best:\n    monitor: -test/loss\n    keep: 1\n"
    )
    now = time.time() - age
    lines: list[dict[str, Any]] = [
        {"kind": "step", "updates": n, "loss": 1.0, "time": {"at": now - 40 + n}}
        for n in (10, 20, 30, 40)
    ]
    tests = [(20, 0.5, 0.9), (40, 0.7, 0.8)]
    lines += [
        {"kind": "phase", "updates": n, "split": "test", "metrics": {"loss": a, "accuracy": b}, "time": {"at": now}}
        for n, a, b in tests
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    if state is not None:
        beat = {"at": now, "host": socket.gethostname(), "pid": pid or os.getpid()}
        (folder / "status.json").write_text(
            json.dumps({"state": state, "attempt": 2, "updates": 40, "heartbeat": beat, **more})
        )
    return folder
