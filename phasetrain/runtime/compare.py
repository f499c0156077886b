"""Former name of `phasetrain.proof.compare`, for `phasetrain.hooks.recheck`."""

from phasetrain.proof.compare import differences

__all__ = ["differences"]
