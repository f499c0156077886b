"""Hooks, a loss and a meter for runs with three ranks that use the collectives for custom parts."""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from phasetrain.distributed import (
    gather_rows,
    gather_with_gradient,
    log_once,
    rank_zero_first,
    reduce,
)
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.losses import LOSSES
from phasetrain.meters import METERS, Meter


@LOSSES.register("counting")
class Counting(torch.nn.Module):
    """Cross entropy that counts its updates in a buffer, which it replaces by a new tensor."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        return torch.nn.functional.cross_entropy(output, target)


@METERS.register("exact_auc")
class ExactAuc(Meter):
    """AUC of the score of class 0, which needs all scores at once."""

    scores: Tensor
    labels: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_rows("scores", dtype=torch.float64)
        self.add_rows("labels", dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        self.append_rows("scores", out.output[:, 0], out.mask)
        self.append_rows("labels", out.target, out.mask)

    def compute(self) -> dict[str, float]:
        zero, other = self.scores[self.labels == 0], self.scores[self.labels != 0]
        above = (zero[:, None] > other[None]).double().mean()
        return {"value": float(above), "rows": float(len(self.scores))}


@HOOKS.register("collective_checks")
class Checks(Hook):
    """Asserts the results of all collectives on three ranks."""

    main_only = False
    observe_only = True

    def on_start(self, run: Run) -> None:
        world, rank = run.world, run.world.rank
        assert world.size == 3
        mine = torch.full((rank, 2), float(rank))
        found = gather_rows(world, {"a": mine, "b": [mine[:, 0]]})
        assert found["a"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert found["b"][0].tolist() == [1.0, 2.0, 2.0]
        counted = gather_rows(world, torch.tensor([rank, 9]), torch.tensor([True, False]))
        assert counted.tolist() == [0, 1, 2]
        numbers = {
            how: reduce(world, torch.tensor(1.0 + rank), how).item()
            for how in ("sum", "mean", "min", "max")
        }
        assert numbers == {"sum": 6.0, "mean": 2.0, "min": 1.0, "max": 3.0}

        weight = torch.tensor([[1.0 + rank]], requires_grad=True)
        rows = gather_with_gradient(world, weight)
        assert rows.tolist() == [[1.0], [2.0], [3.0]]
        ((rank + 1) * (rows**2).sum()).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert weight.grad.item() == 6 * 2 * (1.0 + rank)

        assert run.folder is not None
        cache = Path(f"{run.folder.path}.cache")
        with rank_zero_first(world):
            assert cache.exists() is not world.is_main
            cache.touch()
        log_once(world, "said once")
        assert world.all_reduce_sum(rank) == 3
        assert world.broadcast(f"from {rank}") == "from 0"
        assert (world.gather(rank) == [0, 1, 2]) if world.is_main else (world.gather(rank) is None)


@HOOKS.register("die_in_test")
class DieInTest(Hook):
    """Kills rank 0 once, after the third step of a test."""

    observe_only = True

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        assert run.folder is not None
        marker = Path(f"{run.folder.path}.died")
        if not phase.is_train and run.state.step == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
