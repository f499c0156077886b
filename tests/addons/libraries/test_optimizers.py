"""Optimizers of timm and schedulers of PyTorch and timm give the values of the libraries."""

from typing import Any

import pytest
import torch
from raising import raises
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)

from phasetrain.errors import ConfigError
from phasetrain.optim.optimizers import OPTIMIZERS
from phasetrain.optim.schedules.schedules import SCHEDULES

UPDATES = 40
FACTS = {"updates": UPDATES, "updates_per_epoch": 10.0, "batch_size": 4, "base_value": 0.2}


def made(name: str, **params: Any) -> Any:
    return SCHEDULES.build(name, params, facts=FACTS)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=0.2, momentum=0.9)


class TestSchedulersOfTorch:
    @pytest.mark.parametrize(
        ("kind", "params"),
        [
            (CosineAnnealingWarmRestarts, {"T_0": 5, "T_mult": 2, "eta_min": 0.01}),
            (OneCycleLR, {"max_lr": 1.0, "total_steps": UPDATES}),
            (CyclicLR, {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 4}),
            (PolynomialLR, {"total_iters": 30, "power": 2.0}),
        ],
    )
    def test_each_update_has_the_value_of_the_library(
        self, kind: Any, params: dict[str, Any]
    ) -> None:
        momentum = {"cycle_momentum": False} if kind in (OneCycleLR, CyclicLR) else {}
        plain = optimizer()
        scheduler, found = (
            kind(plain, **params, **momentum),
            made(f"torch.{kind.__name__}", **params),
        )
        for update in range(UPDATES):
            assert 0.2 * found(update / UPDATES) == pytest.approx(
                plain.param_groups[0]["lr"], rel=1e-12
            )
            plain.step()
            if update < UPDATES - 1:
                scheduler.step()

    @pytest.mark.parametrize(
        ("name", "params", "same"),
        [
            ("OneCycleLR", {"max_lr": 1.0}, {"max_lr": 1.0, "total_steps": UPDATES}),
            ("OneCycleLR", {"max_lr": 1.0, "epochs": 4}, {"max_lr": 1.0, "total_steps": UPDATES}),
            (
                "OneCycleLR",
                {"max_lr": 1.0, "epochs": 4, "steps_per_epoch": 12},
                {"max_lr": 1.0, "total_steps": 48},
            ),
            ("CosineAnnealingLR", {}, {"T_max": UPDATES}),
            ("StepLR", {"step_size": "1 epochs"}, {"step_size": 10}),
            ("StepLR", {"step_size": "2 epochs", "every": "epoch"}, {"step_size": 20}),
            ("StepLR", {"step_size": "25 %"}, {"step_size": 10}),
            ("MultiStepLR", {"milestones": ["1 epochs", 25]}, {"milestones": [10, 25]}),
        ],
    )
    def test_lengths_are_durations_or_those_of_the_run(
        self, name: str, params: dict[str, Any], same: dict[str, Any]
    ) -> None:
        one, other = made(f"torch.{name}", **params), made(f"torch.{name}", **same)
        values = [other(update / UPDATES) for update in range(UPDATES)]
        assert [one(update / UPDATES) for update in range(UPDATES)] == pytest.approx(values)
        assert len(set(values)) > 1

    def test_value_depends_on_where_alone(self) -> None:
        found = made("torch.CosineAnnealingWarmRestarts", T_0=7)
        forward = [found(update / UPDATES) for update in range(UPDATES)]
        assert [found(update / UPDATES) for update in reversed(range(UPDATES))] == forward[::-1]
        assert made("torch.CosineAnnealingWarmRestarts", T_0=7)(33 / UPDATES) == forward[33]
        assert len(set(forward)) > 6

    def test_scheduler_can_step_per_epoch(self) -> None:
        found = made("torch.StepLR", step_size=2, gamma=0.1, every="epoch")
        assert [found(update / UPDATES) for update in (0, 9, 10, 19, 20, 39)] == pytest.approx(
            [1, 1, 1, 1, 0.1, 0.1]
        )
        plain = optimizer()
        assert StepLR(plain, 2, 0.1).get_last_lr() == [0.2]

    @pytest.mark.parametrize(
        ("name", "params", "message"),
        [
            ("torch.StepLr", {}, r"'StepLr'.*'StepLR'"),
            ("torch.LambdaLR", {}, r"'LambdaLR'"),
            ("torch.ReduceLROnPlateau", {}, r"'ReduceLROnPlateau'"),
            (
                "torch.StepLR",
                {},
                r"OPTIMIZER\.SCHEDULES\.step_size:",
            ),
            (
                "torch.StepLR",
                {"step_sise": 3},
                r"OPTIMIZER\.SCHEDULES\.step_sise: .*'step_size'",
            ),
            (
                "torch.OneCycleLR",
                {"max_lr": 1.0, "total_steps": 30},
                r"'torch\.OneCycleLR'\): .*\d+",
            ),
            (
                "torch.OneCycleLR",
                {"max_lr": 1.0, "total_steps": UPDATES, "cycle_momentum": True},
                r"cycle_momentum = true:",
            ),
            ("torch.StepLR", {"step_size": "3 epoxs"}, r"step_size = '3 epoxs'"),
            ("torch.StepLR", {"step_size": 3, "base_value": 0.0}, r"'torch\.StepLR'\): .*\b0\b"),
            (
                "torch.StepLR",
                {"step_size": 3, "every": "epoch", "updates_per_epoch": float("nan")},
                r"every = 'epoch':",
            ),
        ],
    )
    def test_bad_names_and_parameters_are_rejected(
        self, name: str, params: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            made(name, **params)


class TestTimm:
    @pytest.fixture(autouse=True)
    def _timm(self) -> None:
        pytest.importorskip("timm")

    def test_optimizer_is_found_by_name(self) -> None:
        from timm.optim import Lion

        weights = [nn.Parameter(torch.ones(2))]
        found = OPTIMIZERS.build("timm.lion", {"params": weights, "lr": 0.1, "betas": [0.8, 0.9]})
        assert type(found) is Lion
        assert list(found.param_groups[0]["betas"]) == [0.8, 0.9]
        weights[0].grad = torch.tensor([1.0, -2.0])
        found.step()
        assert weights[0].tolist() == pytest.approx([0.9, 1.1])

    @pytest.mark.parametrize(
        ("name", "params", "problem"),
        [
            (
                "timm.lyon",
                {},
                {
                    "code": "config.unknown_part",
                    "key": "OPTIMIZER.name",
                    "given": "'timm.lyon'",
                    "suggestion": "lion",
                },
            ),
            (
                "timm.adahessian",
                {},
                {"key": "OPTIMIZER.name", "given": "'timm.adahessian'"},
            ),
            (
                "timm.lion",
                {"beta": 1},
                {
                    "code": "config.unknown_parameter",
                    "key": "OPTIMIZER.beta",
                    "suggestion": "betas",
                },
            ),
        ],
    )
    def test_bad_names_and_parameters_are_rejected(
        self, name: str, params: dict[str, Any], problem: dict[str, str]
    ) -> None:
        with raises(ConfigError, **problem):
            OPTIMIZERS.build(name, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.1} | params)

    def test_its_schedulers(self) -> None:
        from timm.scheduler import CosineLRScheduler

        plain = optimizer()
        scheduler = CosineLRScheduler(
            plain, 20, lr_min=0.01, cycle_mul=2.0, cycle_limit=2, warmup_t=5
        )
        found = made(
            "timm.cosine", t_initial=20, lr_min=0.01, cycle_mul=2.0, cycle_limit=2, warmup_t=5
        )
        for update in (*range(UPDATES), 3):
            scheduler.step(update)
            assert 0.2 * found(update / UPDATES) == pytest.approx(
                plain.param_groups[0]["lr"], rel=1e-12
            )

    def test_they_last_as_long_as_the_run_unless_told(self) -> None:
        assert made("timm.cosine")(0.5) == pytest.approx(0.5)
        by_epochs = made("timm.poly", power=1.0, every="epoch")
        assert [by_epochs(where) for where in (0.0, 0.24, 0.25, 0.5)] == pytest.approx(
            [1.0, 1.0, 0.75, 0.5]
        )

    def test_one_that_looks_at_a_metric_is_no_schedule(self) -> None:
        with raises(ConfigError, code="config.unknown_part", key="OPTIMIZER.SCHEDULES.name"):
            made("timm.plateau")
