import math

import pytest
import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.meters import Perplexity


def test_value_is_exp_of_the_mean_over_tokens():
    generator = torch.Generator().manual_seed(13)
    logits, tokens = (
        torch.randn(50, 9, generator=generator),
        torch.randint(9, (50,), generator=generator),
    )
    meter = Perplexity()
    for begin, end in ((0, 10), (10, 13), (13, 50)):
        loss = torch.nn.functional.cross_entropy(logits[begin:end], tokens[begin:end])
        meter.update(StepOutput(loss, float(end - begin), 1))
    whole = torch.nn.functional.cross_entropy(logits, tokens)
    assert meter.compute() == pytest.approx(float(whole.exp()), rel=1e-6)


def test_value_is_not_the_mean_of_perplexities():
    meter = Perplexity()
    meter.update(StepOutput(torch.tensor(math.log(2.0), dtype=torch.float64), 3.0, 1))
    meter.update(StepOutput(torch.tensor(math.log(32.0), dtype=torch.float64), 1.0, 1))
    assert meter.compute() == pytest.approx(4.0)  # the mean is (3 * 2 + 32) / 4 = 9.5


def test_huge_loss_is_infinite():
    meter = Perplexity()
    meter.update(StepOutput(torch.tensor(1000.0), 1.0, 1))
    assert meter.compute() == math.inf
