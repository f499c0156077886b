"""Updates of samples are found without computing the order before them."""

import numpy as np
import pytest

from phasetrain.addons.experiments.fork.sample_updates import find_updates
from phasetrain.data.samplers.locate import EpochOrder
from phasetrain.data.samplers.permutation import Identity
from phasetrain.data.samplers.phase_sampler import SAMPLERS, PhaseSampler
from phasetrain.distributed import World
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import PhaseSettings, Plan, Split, Stage


def plan_of(length: int = 18, batch_size: int = 4, **settings: int) -> Plan:
    splits = {
        "train": Split("train", length, batch_size, drop_last=False),
        "test": Split("test", 5, 2, drop_last=False),
    }
    return interleave([Stage(splits, PhaseSettings(**settings))])


def sampler(length: int = 18, windows: tuple[int, ...] = ()) -> PhaseSampler:
    return PhaseSampler(
        SAMPLERS["shuffled"](),
        length,
        seed=0,
        micro_batch_size=2,
        world=World(),
        windows=windows,
    )


@pytest.mark.parametrize("tests", [1, 2, 99])
def test_updates_are_those_whose_draws_contain_the_samples(tests: int) -> None:
    plan = plan_of(epochs=3, test_every_updates=tests)
    made = sampler()
    ids = np.array([3, 11])
    expected = []
    updates = 0
    for phase in plan.phases:
        if phase.is_train:
            for draws in made.steps(phase):
                updates += 1
                if any(one in ids for draw in draws for one in draw.indices):
                    expected.append(updates)
    assert list(find_updates(plan, made, ids)) == expected
    assert len(expected) == 5


def test_samples_outside_of_the_updates_have_none() -> None:
    plan = plan_of(epochs=2, limit_train=1)
    made = sampler()
    used = {int(one) for phase in plan.phases for one in made.find_pass(phase)[0:4]}
    unused = np.array([one for one in range(18) if one not in used])
    assert len(unused) > 5
    assert list(find_updates(plan, made, unused)) == []


def test_only_the_epochs_before_the_first_update_are_looked_at() -> None:
    class Counted(PhaseSampler):
        epochs = 0

        def find_pass(self, phase: object) -> EpochOrder:
            self.epochs += 1
            return Identity(18)

    made = Counted(SAMPLERS["sequential"](), 18, seed=0, micro_batch_size=2, world=World())
    assert next(find_updates(plan_of(epochs=1000), made, np.array([17]))) == 5
    assert made.epochs == 1
