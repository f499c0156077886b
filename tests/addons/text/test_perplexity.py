import math

import pytest
import torch
from raising import raises

from phasetrain.addons.text.perplexity import BitsPerByte, Perplexity
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError


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


@pytest.mark.feature("meters.bits_per_byte", "bits per byte, exact", "`METERS.bits_per_byte`")
def test_bits_per_byte_are_the_bits_of_all_tokens_over_their_bytes():
    meter = BitsPerByte(token_bytes=[1, 3, 0, 2])
    nats = math.log(2)
    targets = torch.tensor([0, 1, 2, 3])
    meter.update(StepOutput(torch.tensor(6 * nats), 4.0, 1, target=targets))
    mask = torch.tensor([True, False, True, False])
    meter.update(StepOutput(torch.tensor(4 * nats), 2.0, 1, target=targets, mask=mask))
    meter.update(StepOutput(torch.tensor(math.nan), 0.0, 0, target=targets))
    # 24 bits for 6 bytes, and 8 bits for 1
    assert meter.compute() == pytest.approx(32 / 7)
    assert meter.direction() == "smaller"


def test_bits_per_byte_need_the_bytes_of_tokens():
    with raises(ConfigError, code="meters.no_token_bytes"):
        BitsPerByte().update(StepOutput(torch.tensor(1.0), 1.0, 1, target=torch.tensor([0])))
    assert math.isnan(BitsPerByte([1]).compute())
