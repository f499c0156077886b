"""Completes checkpoints that leave out frozen tensors (CHECKPOINT.exclude)."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from phasetrain.checkpoint.contents import LoadedCheckpoint
from phasetrain.errors import ChangedError
from phasetrain.models.excluded import MAX_LISTED, hash_tensor
from phasetrain.runtime.format import join_first


def excluded_digests(loaded: LoadedCheckpoint | None) -> Mapping[str, str]:
    """Return name -> digest of the tensors that a checkpoint leaves out."""
    if loaded is None:
        return {}
    digests: Mapping[str, str] = loaded.promised.get("excluded", {})
    return digests


def complete_state(
    path: str, digests: Mapping[str, str], state: Mapping[str, Any], model: nn.Module
) -> Mapping[str, Any]:
    """Return the saved state of a model with the tensors that the checkpoint leaves out.

    Args:
        path: the checkpoint, for messages.
        digests: result of `excluded_digests`.
        state: state of the model in it.
        model: the model with its initial values, from the seed and MODEL.weights.

    Raises:
        ChangedError: the model has other initial values than when the run began.
    """
    own = {name: value for name, value in model.state_dict().items() if name in digests}
    changed = [name for name, value in own.items() if hash_tensor(name, value) != digests[name]]
    if changed:
        raise ChangedError(
            f"MODEL.weights: {path} leaves out {len(digests)} frozen tensors (the base of "
            "MODEL.adapters, or CHECKPOINT.exclude), which come from the seed and MODEL.weights, "
            f"and {len(changed)} of them now have other values than when the run began: "
            f"{join_first(changed, MAX_LISTED)}; restore the file that MODEL.weights names, or the "
            "code of the model",
            code="checkpoint.excluded_differ",
        )
    return {**own, **state}
