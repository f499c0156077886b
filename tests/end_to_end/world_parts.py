"""Parts that record the samples of each rank, count the samples of a test, and stop a run at any
step."""

import json
import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.meters import METERS, Meter


@HOOKS.register("ids")
class Ids(Hook):
    """Writes the sample indices of each step, also in tests, to a file per rank next to the run
    folder."""

    main_only = False
    observe_only = True

    def __init__(self) -> None:
        self.ids: list[int] = []

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        self.ids += batch.ids.tolist()

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        assert run.folder is not None
        told = {
            "phase": phase.index,
            "step": run.state.step,
            "rank": run.world.rank,
            "ids": self.ids,
        }
        with open(f"{run.folder.path}.ids-{run.world.rank}", "a") as file:
            file.write(json.dumps(told) + "\n")
        self.ids = []


@HOOKS.register("halt")
class Halt(Hook):
    """Sends SIGTERM to one rank after a step of a phase.

    Args:
        phase: index of the phase in the plan.
        step: number of completed steps of the phase.
        rank: rank that gets the signal.
    """

    main_only = False
    observe_only = True

    def __init__(self, phase: int, step: int, rank: int = 0) -> None:
        self.at, self.rank = (phase, step), rank

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if (phase.index, run.state.step) == self.at and run.world.rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


@METERS.register("seen")
class Seen(Meter):
    """Counts how often each sample occurs."""

    counts: Tensor

    def __init__(self, samples: int = 2000) -> None:
        super().__init__()
        self.add_sum("counts", (samples,), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        assert out.ids is not None
        self.counts.index_add_(0, out.ids, torch.ones_like(out.ids))

    def compute(self) -> dict[str, float]:
        return {
            "samples": int((self.counts > 0).sum()),
            "most": int(self.counts.max()),
            "sum": int(self.counts.sum()),
        }


def read_sample_ids(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return the sample indices by phase and step, concatenated over the ranks."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for file in sorted(folder.parent.glob(f"{folder.name}.ids-*")):
        for line in file.read_text().splitlines():
            one = json.loads(line)
            step = found.setdefault((one["phase"], one["step"]), {})
            assert one["rank"] not in step, (
                f"step {one['step']} of phase {one['phase']} was done twice"
            )
            step[one["rank"]] = one["ids"]
    return {
        at: [index for rank in sorted(step) for index in step[rank]]
        for at, step in sorted(found.items())
    }
