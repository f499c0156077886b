"""Runs on an emulated CUDA device: one is killed and resumed, of one an update is recorded."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from emulated_cuda import Device, Record
from harness import SMALL, differences_of_runs

from phasetrain.engine.loop import PhaseEngine
from phasetrain.models import SmallCNN
from phasetrain.testing.kills import KillAfter, Killed, SaveEachStep, run_quietly

CUDA = ("MACHINE.device=cuda", "PHASES={epochs: 2, limit: {train: 3, test: 1}}")

EVENT = "wait Event.synchronize phasetrain/optim/update/guard.py read"
READ = "wait _local_scalar_dense phasetrain/optim/update/gradients.py all_finite"

KERNELS = {
    "phasetrain/engine/batch.py <lambda>": 2,
    "phasetrain/hooks/ledger.py <listcomp>": 2,
    "phasetrain/hooks/ledger.py on_batch": 2,
    "phasetrain/losses/cross_entropy.py forward": 2,
    "phasetrain/meters/accuracy.py update": 6,
    "phasetrain/meters/class_scores.py find_kept": 1,
    "phasetrain/meters/class_scores.py find_outside": 2,
    "phasetrain/meters/loss.py update": 2,
    "phasetrain/models/small_cnn.py forward": 15,
    "phasetrain/optim/update/gradients.py _mark_nonfinite": 1,
    "phasetrain/optim/update/gradients.py reset": 1,
    "phasetrain/optim/update/guard.py __init__": 2,
    "phasetrain/optim/update/guard.py restore_where": 5,
    "phasetrain/optim/update/guard.py save": 1,
    "phasetrain/optim/update/updater.py _step_gated": 1,
    "phasetrain/optim/update/updater.py backward": 17,
}
"""Kernels and copies of an update of `small_cnn`, by file and function."""

RECORDED = 3
"""Number of the update that is recorded: the first ones create the state of the optimizer."""


def kill_and_resume(folder: Path, *words: str) -> None:
    """Compare a run with one that is killed after its second step and resumed."""
    run_quietly([*words, *CUDA, f"RUN.dir={folder / 'unbroken'}"])
    killed = [*words, *CUDA, f"RUN.dir={folder / 'killed'}"]
    with pytest.raises(Killed):
        run_quietly(killed, {"save": SaveEachStep(), "kill": KillAfter(2)})
    run_quietly(killed)
    found = differences_of_runs(folder / "unbroken", folder / "killed")
    assert not found, f"the resumed run differs: {found}"


def record_update(folder: Path, device: Device, *words: str) -> list[Record]:
    """Return what one update does on the device, from the copy of its batch on."""
    recorded: list[Record] = []

    def loop(engine: PhaseEngine) -> None:
        device.records.clear()
        for number, batches in enumerate(engine.steps()):
            task = engine.task
            engine.finish(task.train_step(batches, engine.position(), engine.events()))
            if number == RECORDED:
                recorded.extend(device.records)
            device.records.clear()

    length = f"PHASES={{epochs: 1, limit: {{train: {RECORDED + 2}}}}}"
    has_model = any(word.startswith("MODEL=") for word in words)
    small = [word for word in SMALL if not (has_model and word.startswith("MODEL"))]
    # Nothing reads the loss to log it.
    small += ["HOOKS.metrics.every_updates=100", "DATA.TEST=null", "RUN.exact=false"]
    words = (*small, f"RUN.dir={folder}", *words)
    run_quietly([*words, "MACHINE.device=cuda", length], loop=loop)
    return recorded


def record_bare_update(device: Device, *, measures: bool) -> list[Record]:
    """Return what an update of the same model and optimizer does in a loop by hand.

    Args:
        device: the device.
        measures: sum up the loss and the number of correct samples, as the run does.
    """
    model = SmallCNN(10, width=4, dropout=0.3).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    total = torch.zeros((), device="cuda", dtype=torch.float64)
    correct = torch.zeros((), device="cuda", dtype=torch.int64)
    images, labels = torch.rand(24, 1, 8, 8), torch.arange(24) % 10
    for _ in range(2):
        device.records.clear()
        batch = images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)
        output = model(batch[0])
        loss = torch.nn.functional.cross_entropy(output, batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if measures:
            total.add_(loss.detach(), alpha=len(images))
            correct += output.detach().argmax(1).eq(batch[1]).sum()
    return list(device.records)


def count_kernels(records: list[Record]) -> int:
    """Return the number of kernels and copies."""
    return sum(record.count for record in records if record.kind in ("kernel", "copy"))


def group_kernels(records: list[Record]) -> Counter[str]:
    """Return the number of kernels and copies by file and function."""
    counts: Counter[str] = Counter()
    for record in records:
        if record.kind in ("kernel", "copy"):
            counts[record.place] += record.count
    return counts


def check_waits(records: list[Record], expected: list[str]) -> None:
    """Check that an update waits for the device where it is known to, and nowhere else."""
    waits = [record for record in records if record.kind == "wait"]
    found = [f"{record.kind} {record.operator} {record.place}" for record in waits]
    assert found == expected, "\n".join(map(str, waits))


def check_kernels(records: list[Record]) -> None:
    """Check that an update of `small_cnn` starts the known kernels; the message names lines."""
    found = group_kernels(records)
    changed = {place for place in {*found, *KERNELS} if found[place] != KERNELS.get(place, 0)}
    lines = dict.fromkeys(str(record) for record in records if record.place in changed)
    assert not changed, "\n".join([*map(str, sorted(changed)), *lines])
