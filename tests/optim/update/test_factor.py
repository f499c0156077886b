"""The factor of an updater multiplies all learning rates, on top of their schedules."""

from typing import Any

import pytest
import torch

from phasetrain.optim import SCHEDULES, Schedules, Updater


def updater(**options: Any) -> Updater:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    groups: list[Any] = [
        {"params": layers[0].parameters()},
        {"params": layers[1].parameters(), "lr": 0.5},
    ]
    return Updater(torch.optim.SGD(groups, lr=0.1, momentum=0.9), **options)


class TestFactor:
    def lrs(self, one: Updater, where: float = 0.0) -> list[float]:
        one.begin(where)
        return [group["lr"] for group in one.optimizer.param_groups]

    def test_it_multiplies_what_was_configured(self) -> None:
        one = updater()
        for factor in (0.5, 0.25, 1.0):  # of the configured value each time, not of the last one
            one.factor = factor
            assert self.lrs(one) == pytest.approx([0.1 * factor, 0.5 * factor])
            assert self.lrs(one) == pytest.approx([0.1 * factor, 0.5 * factor])

    def test_it_multiplies_a_schedule(self) -> None:
        facts = {"updates": 4, "updates_per_epoch": 2.0, "batch_size": 1}
        one = updater(schedules=Schedules({"lr": SCHEDULES.build("linear", facts=facts)}))
        one.factor = 0.5
        assert self.lrs(one, 0.5) == pytest.approx([0.025, 0.125])
        assert one.optimizer.param_groups[0]["momentum"] == 0.9

    def test_it_is_state_and_the_learning_rate_is_not(self) -> None:
        one, other, untouched = updater(), updater(), updater()
        one.factor = 0.5
        self.lrs(one)
        state = one.state_dict()
        assert (state["factor"], "options" in state, "factor" in untouched.state_dict()) == (
            0.5,
            False,
            False,
        )
        other.load_state_dict(state)
        assert self.lrs(other) == pytest.approx([0.05, 0.25])
        other.load_state_dict(untouched.state_dict())
        assert self.lrs(other) == pytest.approx([0.1, 0.5])
