"""Exceptions with which models, losses and meters reject their inputs."""

from phasetrain.distributed import is_lost_peer
from phasetrain.errors import ConfigError, is_out_of_memory

MISFITS = (RuntimeError, ValueError, IndexError, TypeError)
"""Types that torch and custom code raise for wrong shapes, dtypes and values."""


def raise_unless_misfit(error: Exception) -> None:
    """Raise an exception again if the config is not to blame for it.

    Exhausted memory, a killed loader worker and a lost rank surface as a RuntimeError in whatever
    line runs next; a ConfigError already names its key.
    """
    if (
        isinstance(error, ConfigError)
        or is_out_of_memory(error)
        or "DataLoader worker" in str(error)
        or is_lost_peer(error)
    ):
        raise error
