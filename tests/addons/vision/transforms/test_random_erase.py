import numpy as np
import pytest
import torch

from phasetrain.addons.vision.transforms.random_erase import RandomErase
from phasetrain.data.transforms import Keys


def test_rectangles_have_these_positions():
    erased = RandomErase(1, [0.3, 0.3])(torch.ones(2, 1, 5, 5), Keys([1, 2]))[:, 0]
    assert erased[0].tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
    ]
    assert erased[1].tolist() == [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 0, 0, 0, 1],
        [1, 0, 0, 0, 1],
        [1, 1, 1, 1, 1],
    ]


def test_probability_and_area_are_within_their_bounds():
    batch = torch.ones(1000, 2, 40, 40)
    areas = 1 - RandomErase(0.25, (0.1, 0.2))(batch, Keys(np.arange(1000))).mean((1, 2, 3))
    touched = areas > 0
    assert touched.float().mean().item() == pytest.approx(0.25, abs=0.04)
    assert areas[touched].mean().item() == pytest.approx(0.15, abs=0.01)
    assert areas.max() < 0.23


def test_same_rectangle_is_erased_in_all_channels():
    erased = RandomErase(1)(torch.ones(4, 3, 9, 9), Keys(np.arange(4)))
    assert torch.equal(erased[:, 0], erased[:, 2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"probability": 2.0}, "probability = 2.0"),
        ({"scale": (0.0, 0.5)}, r"scale = \[0.0, 0.5\]"),
        ({"scale": (0.5, 0.2)}, r"scale = \[0.5, 0.2\]"),
        ({"scale": (0.5,)}, r"scale = \[0.5\]"),
    ],
)
def test_bad_parameters_are_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        RandomErase(**given)
