"""Which dotted paths a config from elsewhere may name."""

import pytest

from phasetrain.config.trust import is_library_path


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("torch.nn.Linear", True),
        ("torch._inductor.x", False),
        ("torch.distributed.nn.RemoteModule", False),
        ("os.system", False),
        ("albumentations.HorizontalFlip", True),
        ("albumentations._private", False),
        ("albumentations.core.serialization.load", False),
    ],
)
def test_path_of_a_library(path: str, known: bool) -> None:
    assert is_library_path(path) is known
