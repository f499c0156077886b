"""Parts that draw from Python's or NumPy's generator resume exactly, and others cost nothing."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, newest, run_until_killed, train
from torch import Tensor, nn

from phasetrain.runtime.machine import preserve_generators
from phasetrain.tasks.generator_use import WATCHED_STEPS, GeneratorUse


class RandomDepth(nn.Module):
    """Skips its second layer at random, and scales by another random number."""

    def __init__(self, chance: float = 0.5, source: str = "python") -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.second = nn.Linear(10, 10)
        self.chance = chance
        self.source = source

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.first(images.flatten(1))
        if self.source == "numpy":
            return out * float(np.random.rand())
        if random.random() < self.chance:
            out = out + self.second(out)
        return out


class NoisyLoss(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = super().forward(output, target)
        return loss * random.uniform(0.5, 1.5)


RANDOM = ("~MODEL.width", "~MODEL.dropout", f"MODEL.name={__name__}.RandomDepth")


@pytest.mark.parametrize(
    "words",
    [
        RANDOM,
        (*RANDOM, "+MODEL.source=numpy", "OPTIMIZER.accumulate=2"),
        (f"LOSS={{name: {__name__}.NoisyLoss}}",),
    ],
)
def test_part_that_draws_resumes_exactly(tmp_path: Path, words: tuple[str, ...]) -> None:
    words = ("PHASES.epochs=2", "OPTIMIZER.fused=false", *words)
    train(tmp_path / "whole", *words)
    for kill in (3, 3):
        random.seed(kill)
        np.random.seed(kill)
        hooks = {"save": SaveEachStep(), "kill": KillAfter(kill)}
        run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []
    assert newest(tmp_path / "killed").state["task"]["generators"] == {"draws": True}


def test_all_generators_are_seeded_once_one_pass_has_drawn() -> None:
    with preserve_generators():
        use = GeneratorUse()
        use.begin_phase()
        for _ in range(WATCHED_STEPS):
            use.seed(1)
            torch.rand(1)
            use.check_pass()
            use.finish_step()
        assert (use.draws, use.watches, use.state_dict()) == (False, False, {})
        before = random.getstate()
        use.seed(2)
        assert random.getstate() == before
        use.begin_phase()
        use.seed(3)
        random.random()
        use.check_pass()
        use.finish_step()
        assert (use.draws, use.watches) == (True, False)
        drawn = []
        for seed in (4, 4):
            use.seed(seed)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[0] == drawn[1]
        other = GeneratorUse()
        other.merge_rank_states([{}, use.rank_state()], is_main=False)
        assert other.draws
