"""A sum of losses: each one is weighted, logged by its label, and gets its outputs and targets."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasetrain.losses import LOSSES, WeightedSum

A, B = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])


def make(section: Mapping[str, Any], where: str) -> nn.Module:
    params = {key: value for key, value in section.items() if key != "name"}
    return LOSSES.build(section["name"], params, where=where)


def made(**losses: Any) -> WeightedSum:
    return WeightedSum(losses, make)


@pytest.mark.feature("41")
def test_sum_is_weighted_and_terms_are_logged() -> None:
    loss = made(near={"name": "MSELoss", "weight": 0.5}, far={"name": "L1Loss", "weight": 3})
    found = loss(A, B)
    assert float(found) == 0.5 * 6.5 + 3 * 2.5
    assert {name: float(value) for name, value in loss.pop_logs().items()} == {
        "loss_near": 6.5,
        "loss_far": 2.5,
    }
    assert loss.pop_logs() == {}


def test_defaults_are_label_as_name_and_weight_one() -> None:
    scores, classes = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    assert float(made(cross_entropy={})(scores, classes)) == pytest.approx(1.3862944)
    smooth = made(cross_entropy={"label_smoothing": 0.5})
    assert smooth.losses["cross_entropy"].label_smoothing == 0.5


def test_each_loss_gets_its_entries_of_output_and_target() -> None:
    outputs, targets = {"x": A, "y": B}, [B, A]
    loss = made(
        one={"name": "L1Loss", "output": "x", "target": 0},
        two={"name": "MSELoss", "output": "y", "target": 0},
        three={"name": "L1Loss", "output": "y", "target": 1},
    )
    assert float(loss(outputs, targets)) == 2.5 + 0.0 + 2.5


def test_only_the_losses_of_the_selected_split_are_computed() -> None:
    loss = made(
        one={"name": "L1Loss", "target": "x", "splits": ["TRAIN", "FIRST"]},
        two={"name": "MSELoss", "target": "y", "splits": ["TRAIN"]},
        three={"name": "MSELoss", "target": "x"},
    )
    loss.select_split("first")
    assert float(loss(A, {"x": B})) == 2.5 + 6.5
    assert list(loss.pop_logs()) == ["loss_one", "loss_three"]
    loss.select_split("train")
    assert float(loss(A, {"x": B, "y": A})) == 2.5 + 0.0 + 6.5
    loss.select_split("other")
    with pytest.raises(ValueError, match=r"LOSS\.losses\.three\.target"):
        loss(A, {"y": B})


def test_loss_with_weights_has_to_be_computed_in_training() -> None:
    with pytest.raises(ValueError, match=r"losses\.own\.splits"):
        WeightedSum({"own": {"splits": ["TEST"]}}, lambda section, where: nn.Linear(2, 2))


def test_gradient_equals_the_gradient_of_the_weighted_sum() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = made(near={"name": "MSELoss", "weight": 2.0}, far={"name": "L1Loss", "weight": -1.0})
    loss(value, B).backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2 * -2.0 + 0.5, 2 * -3.0 + 0.5]
    assert not loss.logs["near"].requires_grad


def test_weights_may_change_and_are_not_saved() -> None:
    loss = made(near={"name": "MSELoss"}, far={"name": "L1Loss"})
    loss.weights["far"] = 0.0
    assert float(loss(A, B)) == 6.5
    assert list(loss.state_dict()) == []
    assert list(loss.parameters()) == []


def test_state_of_a_loss_is_saved_under_its_label() -> None:
    class Learns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.scale * (output - target)).abs().mean()

    loss = WeightedSum({"own": {"weight": 1.0}}, lambda section, where: Learns())
    assert list(loss.state_dict()) == ["losses.own.scale"]
    assert float(loss(A, B).detach()) == 5.0


def test_sums_can_be_nested() -> None:
    def nested(section: Mapping[str, Any], where: str) -> nn.Module:
        return (
            made(deep={"name": "L1Loss", "weight": 4.0})
            if section["name"] == "inner"
            else make(section, where)
        )

    loss = WeightedSum({"inner": {"weight": 0.5}}, nested)
    assert float(loss(A, B)) == 5.0
    assert {name: float(value) for name, value in loss.pop_logs().items()} == {
        "loss_inner": 10.0,
        "loss_inner_deep": 2.5,
    }


class TestMistakes:
    @pytest.mark.parametrize(
        ("losses", "message"),
        [
            ({}, "losses = {}:"),
            (
                {"a": {"name": "L1Loss", "weight": "2"}},
                r"losses\.a\.weight = .2.:",
            ),
            ({"a": {"name": "L1Loss", "weight": float("inf")}}, r"losses\.a\.weight = inf"),
        ],
    )
    def test_invalid_losses_are_rejected_when_built(self, losses: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            made(**losses)

    @pytest.mark.parametrize(
        ("section", "output", "target", "message"),
        [
            (
                {"output": "z"},
                {"x": A, "y": B},
                B,
                r"LOSS\.losses\.a\.output = .z.:",
            ),
            ({"output": "xs"}, {"x": A}, B, r"LOSS\.losses\.a\.output = .xs.: .*'x'"),
            (
                {"target": 2},
                A,
                [A, B],
                r"LOSS\.losses\.a\.target = 2:",
            ),
            (
                {"target": "x"},
                A,
                B,
                r"LOSS\.losses\.a\.target = .x.: .*Tensor",
            ),
            ({}, A[:, None], B, r"LOSS\.losses\.a: .*shapes"),
            (
                {"reduction": "none"},
                A,
                B,
                r"LOSS\.losses\.a: .*scalar",
            ),
        ],
    )
    def test_misfit_is_rejected_when_called(
        self, section: Any, output: Any, target: Any, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            made(a={"name": "MSELoss", **section})(output, target)


@pytest.mark.feature(
    "loss.learned_weights", "learned weights of losses", "`LOSS.losses.LABEL.weight=learned`"
)
def test_learned_weight_is_trained_and_logged() -> None:
    loss = made(near={"name": "MSELoss", "weight": "learned"}, far={"name": "L1Loss", "weight": 3})
    assert float(loss(A, B).detach()) == 6.5 + 3 * 2.5
    loss.log_variances["near"].data.fill_(1.0)
    found = loss(A, B)
    found.backward()
    weight = math.exp(-1.0)
    assert float(found.detach()) == pytest.approx(weight * 6.5 + 1.0 + 3 * 2.5)
    assert float(loss.log_variances["near"].grad) == pytest.approx(1.0 - weight * 6.5)
    assert float(loss.pop_logs()["loss_near_weight"]) == pytest.approx(weight)
    assert list(loss.state_dict()) == ["log_variances.near"]


def test_learned_weight_outside_of_the_training_is_rejected() -> None:
    with pytest.raises(ValueError, match="near"):
        made(
            far={"name": "L1Loss"},
            near={"name": "MSELoss", "weight": "learned", "splits": ["TEST"]},
        )
