"""Patterns match parameters and modules, which are frozen for good or for a number of updates."""

import re

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.errors import ConfigError
from phasetrain.models.freeze import (
    NOTHING,
    FreezeSchedule,
    FrozenNames,
    disable_gradients,
    intersect_frozen,
    match_frozen,
)


def net() -> nn.ModuleDict:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return nn.ModuleDict({"trunk": trunk, "head": nn.Linear(4, 2)})


def tensors(made: nn.Module) -> dict[int, torch.Tensor]:
    return {id(one): one for one in made.parameters() if one.requires_grad}


class TestMatchFrozen:
    def test_pattern_of_a_module_matches_all_inside(self) -> None:
        found = match_frozen(net(), ["trunk"])
        assert sorted(found.parameters) == [
            "trunk.0.bias",
            "trunk.0.weight",
            "trunk.1.bias",
            "trunk.1.weight",
        ]
        assert sorted(found.modules) == ["trunk", "trunk.0", "trunk.1", "trunk.2"]
        assert found.outermost == ["trunk"]
        assert found == match_frozen(net(), ["trunk.*"])

    def test_pattern_of_a_parameter_matches_no_module(self) -> None:
        assert match_frozen(net(), ["*.0.weight"]) == FrozenNames(
            frozenset({"trunk.0.weight"}), frozenset()
        )

    def test_module_is_frozen_if_all_its_parameters_match(self) -> None:
        found = match_frozen(net(), ["trunk.1.weight", "trunk.1.bias"])
        assert found.modules == {"trunk.1"}
        assert match_frozen(net(), ["trunk.[01].*"]).modules == {
            "trunk",
            "trunk.0",
            "trunk.1",
            "trunk.2",
        }

    def test_module_without_parameters_is_frozen_with_its_parent(self) -> None:
        assert "trunk.2" in match_frozen(net(), ["trunk"]).modules
        assert "trunk.2" not in match_frozen(net(), ["trunk.0", "trunk.1.weight"]).modules

    @pytest.mark.parametrize(
        ("pattern", "problem"),
        [
            (
                "trnk.*",
                {"key": "MODEL.freeze", "given": "[trnk.*]", "suggestion": "trunk"},
            ),
            ("trunk.2", {"key": "MODEL.freeze"}),
            ("", {"key": "MODEL.freeze"}),
        ],
    )
    def test_pattern_without_a_match_is_rejected(
        self, pattern: str, problem: dict[str, str]
    ) -> None:
        with raises(ConfigError, **problem):
            match_frozen(net(), [pattern])

    def test_intersection_has_what_all_stages_freeze(self) -> None:
        one, other = match_frozen(net(), ["trunk"]), match_frozen(net(), ["trunk.0", "head"])
        assert intersect_frozen([one, other]) == match_frozen(net(), ["trunk.0"])
        assert intersect_frozen([one]) == one
        assert intersect_frozen([one, NOTHING]) == NOTHING
        assert intersect_frozen([]) == NOTHING


def test_frozen_parameters_require_no_gradient() -> None:
    made = net()
    disable_gradients(made, match_frozen(made, ["trunk.0", "*.bias"]))
    left = [name for name, one in made.named_parameters() if one.requires_grad]
    assert left == ["trunk.1.weight", "head.weight"]


class TestFreezeSchedule:
    def test_parameters_are_frozen_until_their_update(self) -> None:
        made = net()
        until = [(match_frozen(made, ["trunk.0"]), 2), (match_frozen(made, ["trunk.1.weight"]), 4)]
        holds = FreezeSchedule(made, [NOTHING], until, tensors(made))
        names = {id(one): name for name, one in made.named_parameters()}
        found = [
            sorted(names[id(one)] for one in holds.frozen_tensors(updates)) for updates in range(5)
        ]
        both = ["trunk.0.bias", "trunk.0.weight", "trunk.1.weight"]
        assert found == [both, both, ["trunk.1.weight"], ["trunk.1.weight"], []]
        assert [names[id(one)] for one in holds.frozen_tensors(3)] == [
            "trunk.1.weight"
        ]  # asked again, as after a resume

    def test_frozen_modules_are_in_eval_mode(self) -> None:
        made = net()
        holds = FreezeSchedule(made, [NOTHING], [(match_frozen(made, ["trunk"]), 2)], tensors(made))
        made.train()
        holds.begin_stage()
        holds.frozen_tensors(1)
        assert [made["trunk"][1].training, made["head"].training] == [False, True]
        holds.frozen_tensors(2)
        assert all(module.training for module in made.modules())

    def test_permanently_frozen_modules_are_in_eval_mode_from_the_start(self) -> None:
        made = net()
        frozen = match_frozen(made, ["trunk"])
        disable_gradients(made, frozen)
        holds = FreezeSchedule(made, [frozen], (), tensors(made))
        made.train()
        holds.begin_stage()
        before = made["trunk"][1].running_mean.clone()
        made["trunk"](torch.randn(8, 3))
        assert torch.equal(made["trunk"][1].running_mean, before)
        assert holds.frozen_tensors(0) == []
        made["trunk"].train()  # the control: batch norm in training mode would move
        made["trunk"](torch.randn(8, 3))
        assert not torch.equal(made["trunk"][1].running_mean, before)

    def test_each_stage_has_its_own_patterns(self) -> None:
        made = net()
        stages = [match_frozen(made, ["trunk"]), NOTHING]
        holds = FreezeSchedule(made, stages, (), tensors(made))
        made.train()
        holds.begin_stage(0)
        assert len(holds.frozen_tensors(0, 0)) == 4
        assert not made["trunk"].training
        made.train()
        holds.begin_stage(1)
        assert holds.frozen_tensors(1, 1) == []
        assert made["trunk"].training
        assert len(holds.frozen_tensors(1, 0)) == 4

    def test_freezing_all_parameters_is_rejected(self) -> None:
        made = net()
        with raises(ConfigError, code="config.conflict") as caught:
            FreezeSchedule(made, [NOTHING], [(match_frozen(made, ["*"]), 3)], tensors(made))
        assert re.search(r"MODEL\.freeze_updates\b.*\b3\b.*\b6\b", str(caught.value))
        with raises(ConfigError, code="config.conflict") as caught:
            FreezeSchedule(made, [NOTHING, match_frozen(made, ["*"])], (), tensors(made))
        assert re.search(r"MODEL\.freeze\b.*\b6\b", str(caught.value))
