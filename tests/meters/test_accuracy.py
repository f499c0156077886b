import pytest
import torch

from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS, Accuracy

SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
CLASSES = torch.tensor([1, 2, 2, 2])


def out(output, target, mask=None):
    return StepOutput(torch.tensor(0.0), len(output), len(output), output, target, mask)


@pytest.mark.parametrize(("topk", "expected"), [(1, 0.5), (2, 0.75), (3, 1.0)])
def test_accuracy_is_the_fraction_of_hits_among_top_k(topk, expected):
    meter = Accuracy(topk)
    meter.update(out(SCORES, CLASSES))
    assert meter.compute() == expected


@pytest.mark.parametrize(("topk", "expected"), [(1, 1 / 3), (2, 2 / 3)])
def test_masked_samples_do_not_count(topk, expected):
    meter = Accuracy(topk)
    meter.update(out(SCORES, CLASSES, torch.tensor([True, True, False, True])))
    assert meter.samples.item() == 3
    assert meter.compute() == pytest.approx(expected)


@pytest.mark.parametrize(("topk", "expected"), [(1, 1 / 3), (2, 2 / 3)])
def test_each_target_of_a_sample_counts(topk, expected):
    """The second sample is masked, and a target of the first one is ignored."""
    meter = Accuracy(topk, ignore_index=-100)
    scores = torch.stack([SCORES.T, SCORES.T])
    targets = torch.stack([torch.tensor([1, 2, -100, 2]), CLASSES])
    meter.update(out(scores, targets, torch.tensor([True, False])))
    assert meter.samples.item() == 3
    assert meter.compute() == pytest.approx(expected)


def test_steps_are_accumulated():
    meter = Accuracy()
    meter.update(out(SCORES[:1], CLASSES[:1]))
    meter.update(out(SCORES[1:], CLASSES[1:]))
    assert (meter.correct.item(), meter.samples.item()) == (2, 4)
    assert meter.correct.dtype == torch.int64


def test_graph_is_released():
    meter = Accuracy()
    meter.update(out(SCORES.clone().requires_grad_(), CLASSES))
    assert not meter.correct.requires_grad


def test_large_counts_are_exact():
    meter = Accuracy()
    meter.correct += 2**25 + 1
    meter.samples += 2**25 + 2
    assert meter.compute() == (2**25 + 1) / (2**25 + 2)


@pytest.mark.parametrize(
    ("output", "target", "message"),
    [
        (torch.zeros(4), CLASSES, r"outputs \(4,\) .*targets \(4,\)"),
        (SCORES, CLASSES[:3], r"targets \(3,\)"),
        (SCORES, torch.zeros(4, 3), r"targets \(4, 3\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), r"targets \(2, 3\)"),
        (SCORES, torch.zeros(4), "torch.float32"),
        (SCORES[:, :1], CLASSES, "multilabel_accuracy"),
        (SCORES, None, "Tensor .*NoneType"),
    ],
)
def test_misfitting_inputs_are_rejected(output, target, message):
    with pytest.raises(ValueError, match=message):
        Accuracy().update(out(output, target))


def test_topk_above_the_number_of_classes_is_rejected():
    with pytest.raises(ValueError, match=r"topk = 4 .*3 classes"):
        Accuracy(4).update(out(SCORES, CLASSES))
    with pytest.raises(ConfigError, match=r"METERS.top .*topk = 0"):
        METERS.build("accuracy", {"topk": 0}, where="METERS.top")
