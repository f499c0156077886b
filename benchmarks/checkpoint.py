"""Time to save and restore a 105 MB model with Adam (315 MB in total), compared with PyTorch.

    python benchmarks/checkpoint.py [--repetitions 7] [--megabytes 105] [--dir FOLDER] [--json FILE]

The methods take turns in one process; every save goes to a new file or folder, which is deleted.
The output shows medians and ratios to `torch.save`. "Stall" is the time that training is blocked,
"total" the time until the checkpoint is on disk. phasetrain hashes and syncs every file and commits
with a rename, while torch.save does none of this; hence the second row with an fsync. Each restore
runs in a new process, because the first touch of fresh memory takes most of its time.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from phasetrain.checkpoint import Checkpointer, Facts
from phasetrain.checkpoint.background import Background
from phasetrain.engine.position import RunState
from phasetrain.runtime.storage import Storage, tree_digest

Save = Callable[[Path], float]
"""Saves into a path that does not exist yet, and returns the seconds that training would have stood
still."""


@dataclass(frozen=True)
class Row:
    """Timing of one save method in seconds, and relative to `torch.save`."""

    name: str
    stall: float
    total: float
    stall_ratio: float
    total_ratio: float
    megabytes: float


def trained(megabytes: int) -> dict[str, Any]:
    """Return the state of a model with the given size in MB after one update with Adam."""
    layers = [
        torch.nn.Linear(1024, 1024, bias=False)
        for _ in range(max(1, round(megabytes * 1e6 / 4 / 1024**2)))
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.randn(1, 1024)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def synced(path: Path) -> None:
    """Sync every file below a path to disk."""
    for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


@contextmanager
def ways(state: dict[str, Any], scratch: Path) -> Iterator[dict[str, Save]]:
    """Return all save methods by name."""
    checkpointer, writing = Checkpointer(str(scratch / "own"), Storage()), Background[Any]()
    position = iter(range(10**9))
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def plain(path: Path) -> float:
        torch.save(state, path)
        return 0.0

    def with_fsync(path: Path) -> float:
        torch.save(state, path)
        synced(path)
        return 0.0

    def dcp_sync(path: Path) -> float:
        dcp.save(state, checkpoint_id=path, no_dist=True)
        return 0.0

    def dcp_async(path: Path, **options: Any) -> float:
        began = time.perf_counter()
        saving = dcp.async_save(
            state,
            checkpoint_id=path,
            no_dist=True,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            **options,
        )
        if not isinstance(saving, AsyncSaveResponse):
            stall = time.perf_counter() - began
            saving.result()
            return stall
        saving.staging_completion.result()
        stall = time.perf_counter() - began
        saving.upload_completion.result()
        return stall

    def own(path: Path, *, background: bool) -> float:
        began = time.perf_counter()
        draft = checkpointer.make_draft(
            RunState(step=next(position)), {"task": state}, b"{}", Facts()
        )
        stall = time.perf_counter() - began
        writing.start(lambda: checkpointer.write(draft))
        saved = writing.take()
        shutil.move(scratch / "own" / saved.name, path)
        return stall if background else 0.0

    yield {
        "torch.save": plain,
        "torch.save, fsync": with_fsync,
        "dcp.save": dcp_sync,
        "dcp.async_save, thread": dcp_async,
        "dcp.async_save, kept stager": lambda path: dcp_async(path, async_stager=stager),
        "phasetrain": lambda path: own(path, background=False),
        "phasetrain, background": lambda path: own(path, background=True),
    }
    stager.close()


def saving(state: dict[str, Any], repetitions: int, scratch: Path) -> list[Row]:
    """Measure every save method, in turns."""
    taken: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, float] = {}
    with ways(state, scratch) as found:
        for repetition in range(repetitions + 1):
            for name, save in found.items():
                path = scratch / f"{repetition}-{len(taken)}"
                gc.collect()
                os.sync()
                began = time.perf_counter()
                stall = save(path)
                total = time.perf_counter() - began
                files = (
                    [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
                )
                sizes[name] = sum(file.stat().st_size for file in files) / 1e6
                path.unlink() if path.is_file() else shutil.rmtree(path)
                if repetition:  # the first round fetches memory
                    taken.setdefault(name, []).append((stall or total, total))
    middle = {
        name: [median(column) for column in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    base = middle["torch.save"][1]
    return [
        Row(name, stall, total, stall / base, total / base, sizes[name])
        for name, (stall, total) in middle.items()
    ]


def restoring(state: dict[str, Any], repetitions: int, scratch: Path) -> dict[str, float]:
    """Return the median seconds to restore the state, with a new process per trial."""
    file, root = scratch / "state.pt", scratch / "checkpoints"
    torch.save(state, file)
    Checkpointer(str(root), Storage()).save(RunState(), {"task": state}, {})
    taken: dict[str, list[float]] = {}
    for _ in range(repetitions):
        for name in ("torch.load", "hash", "phasetrain"):
            words = [sys.executable, __file__, "--restore", name, str(file), str(root)]
            answer = subprocess.run(words, check=True, capture_output=True, text=True)
            taken.setdefault(name, []).append(float(answer.stdout))
    return {name: median(times) for name, times in taken.items()}


def restore(name: str, file: Path, root: Path) -> float:
    """Return the seconds of one restore in this process, with the files in the page cache."""
    content = file.read_bytes() if name == "hash" else b""
    began = time.perf_counter()
    if name == "torch.load":
        torch.load(file, weights_only=True)
    elif name == "hash":
        tree_digest(content)
    else:
        Checkpointer(str(root), Storage()).load_newest()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--megabytes",
        type=int,
        default=105,
        help="size of the model; Adam's state is twice as large",
    )
    parser.add_argument("--dir", help="where to write; a new folder there is used and deleted")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--restore", nargs=3, metavar=("NAME", "FILE", "ROOT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.restore:
        name, file, root = options.restore
        print(restore(name, Path(file), Path(root)))
        return
    state = trained(options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        rows = saving(state, options.repetitions, Path(folder))
        restored = restoring(state, options.repetitions, Path(folder))
    print(f"{'save':28} {'stall s':>8} {'total s':>8} {'stall':>6} {'total':>6} {'MB':>7}")
    for row in rows:
        print(
            f"{row.name:28} {row.stall:8.3f} {row.total:8.3f} {row.stall_ratio:6.2f} "
            f"{row.total_ratio:6.2f} "
            f"{row.megabytes:7.1f}"
        )
    by_name = {row.name: row for row in rows}
    against = by_name["phasetrain, background"].total / by_name["torch.save, fsync"].total
    print(f"total of phasetrain in the background against torch.save and an fsync: {against:.2f}")
    both = restored["torch.load"] + restored["hash"]
    print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in restored.items()))
    print(f"restore against torch.load and the hash: {restored['phasetrain'] / both:.2f}")
    if options.json:
        content = {"save": [asdict(row) for row in rows], "restore": restored}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
