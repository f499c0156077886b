import pytest
import torch

from phasetrain.data.transforms import Keys, Normalize


def test_each_channel_has_its_own_mean_and_std():
    batch = torch.tensor([[[[1.0, 2.0]], [[3.0, 5.0]]]])
    assert Normalize([1, 3], [0.5, 2])(batch, Keys([0])).tolist() == [[[[0.0, 2.0]], [[0.0, 1.0]]]]


def test_one_entry_is_used_for_all_channels():
    assert Normalize([1.0], [2.0])(torch.ones(1, 3, 1, 1), Keys([0])).sum() == 0


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([0.0], [0.0], r"std = \[0.0\]"),
        ([0.0], [1.0, 1.0], r"std = \[1.0, 1.0\]"),
        ([], [], "mean"),
    ],
)
def test_bad_parameters_are_rejected(mean, std, message):
    with pytest.raises(ValueError, match=message):
        Normalize(mean, std)


def test_other_number_of_channels_is_rejected():
    with pytest.raises(ValueError, match=r"\b2\b.*\b3\b"):
        Normalize([0, 0], [1, 1])(torch.zeros(1, 3, 2, 2), Keys([0]))


def test_a_number_holds_for_all_channels() -> None:
    batch = torch.rand(2, 3, 4, 4)
    expected = Normalize([0.5], [0.25])(batch, Keys([0, 1]))
    assert torch.equal(Normalize(0.5, 0.25)(batch, Keys([0, 1])), expected)
