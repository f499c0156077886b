"""The registry of models (section MODEL)."""

from torch import nn

from phasetrain.config.registry import Registry

MODELS: Registry[nn.Module] = Registry("model", "MODEL")


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for the first of the named sizes (classes, channels, ...) below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} = {size}: expected an integer of at least 1")


def check_dropout(dropout: float) -> None:
    """Raise ValueError unless `dropout`, the probability of zeroing an activation, is in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout = {dropout}: expected a probability in [0, 1)")
