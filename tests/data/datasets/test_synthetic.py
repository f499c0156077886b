import pytest
import torch

from phasetrain.data.datasets import make_synthetic


def test_samples_have_these_values():
    data = make_synthetic(samples=4, input_shape=[2], classes=2)
    assert data.targets.tolist() == [0, 1, 0, 1]
    expected = [[-0.5847, -1.7886], [1.8319, -0.5474], [1.0710, -1.6113], [0.4854, 0.1714]]
    assert torch.allclose(data.inputs, torch.tensor(expected), atol=1e-4)


def test_samples_without_noise_are_the_centers_of_both_parts():
    train, test = (
        make_synthetic(6, (1, 4, 4), 3, noise=0),
        make_synthetic(9, (1, 4, 4), 3, noise=0, part="test"),
    )
    assert torch.equal(train.inputs[:3], test.inputs[6:])
    assert torch.equal(train.inputs[:3], train.inputs[3:])
    assert train.facts()["input_shape"] == (1, 4, 4)


def test_parts_and_seeds_differ():
    first = make_synthetic(8).inputs
    assert not torch.equal(first, make_synthetic(8, part="test").inputs)
    assert not torch.equal(first, make_synthetic(8, seed=1).inputs)
    assert torch.equal(first, make_synthetic(8).inputs)


def test_noise_has_the_standard_deviation():
    data = make_synthetic(4096, (16,), 1, noise=0.5)
    assert data.inputs.std(0).mean().item() == pytest.approx(0.5, abs=0.01)


def test_global_generator_is_not_used():
    before = torch.get_rng_state()
    make_synthetic(8)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"part": "val"}, "part = 'val':"),
        ({"samples": 0}, "samples = 0"),
        ({"input_shape": ()}, r"input_shape = \[\]"),
        ({"noise": -1.0}, "noise = -1.0:"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_parameters_are_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        make_synthetic(**given)
