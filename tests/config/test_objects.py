"""Objects given in Python have names in the config."""

import pytest

from phasetrain.config.objects import display_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("small_cnn", "small_cnn"),
        ("my_parts.Net", "my_parts.Net"),
        ("object:torch.nn.modules.container.Sequential-f79f3d5f", "Sequential"),
        ("object:torch.utils.data.dataset.TensorDataset#2", "TensorDataset"),
        ("object:__main__.make.<locals>.Net-00ff00ff#12", "Net"),
    ],
)
def test_object_is_displayed_as_its_class(name: str, shown: str) -> None:
    assert display_name(name) == shown
