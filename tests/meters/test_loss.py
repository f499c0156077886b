import math

import pytest
import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.meters import MeanLoss


def test_steps_are_weighted():
    meter = MeanLoss()
    meter.update(StepOutput(torch.tensor(1.0, requires_grad=True), 3.0, 3))
    meter.update(StepOutput(torch.tensor(5.0), 1.0, 1))
    assert meter.compute() == 2.0
    assert not meter.total.requires_grad


def test_step_of_weight_zero_is_skipped():
    meter = MeanLoss()
    meter.update(StepOutput(torch.tensor(2.0), 4.0, 4))
    meter.update(StepOutput(torch.tensor(math.nan), 0.0, 0))
    assert meter.compute() == 2.0


def test_small_steps_are_not_lost_in_a_long_phase():
    meter = MeanLoss()
    meter.update(StepOutput(torch.tensor(1.0), 2.0**30, 1))
    for _ in range(4):
        meter.update(StepOutput(torch.tensor(1.0), 1.0, 1))
    assert meter.total.item() == 2.0**30 + 4


def test_number_of_the_logs_replaces_the_loss():
    meter = MeanLoss(of="loss_soft")
    meter.update(StepOutput(torch.tensor(9.0), 3.0, 3, logs={"loss_soft": torch.tensor(1.0)}))
    meter.update(StepOutput(torch.tensor(9.0), 1.0, 1, logs={"loss_soft": 5.0}))
    assert meter.compute() == 2.0
    with pytest.raises(ValueError, match=r"of = 'loss_soft': .*loss_hard"):
        meter.update(StepOutput(torch.tensor(9.0), 1.0, 1, logs={"loss_hard": 5.0}))
