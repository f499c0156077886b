import pytest
import torch

from phasetrain.data.transforms import Keys, Normalize


def test_each_channel_has_its_own_mean_and_std():
    batch = torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    assert Normalize([1, 3], [0.5, 2])(batch, Keys([0])).tolist() == [[[[0.0, 2.0]], [[0.0, 1.0]]]]


def test_one_entry_serves_all_channels():
    assert Normalize([1.0], [2.0])(torch.ones(1, 3, 1, 1), Keys([0])).sum() == 0


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [([0.0], [0.0], r"std = \[0.0\]"), ([0.0], [1.0, 1.0], "same number"), ([], [], "at least 1")],
)
def test_bad_parameters_are_refused(mean, std, message):
    with pytest.raises(ValueError, match=message):
        Normalize(mean, std)


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(ValueError, match="have 2 entries, images 3 channels"):
        Normalize([0, 0], [1, 1])(torch.zeros(1, 3, 2, 2), Keys([0]))
