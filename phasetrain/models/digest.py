"""The SHA-256 of the weights of a model, by which runs are compared."""

from collections.abc import Mapping
from hashlib import sha256

from torch import Tensor, nn

from phasetrain.distributed.dtensors import full_tensor
from phasetrain.proof.digest import add_tensor


def hash_model(model: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of a model's state, sorted by name."""
    return hash_state(model.state_dict())


def hash_state(state: Mapping[str, Tensor]) -> str:
    """Return the digest of a model with this state; if it is sharded, all ranks have to call."""
    digest = sha256()
    for name, tensor in sorted(state.items()):
        add_tensor(digest.update, full_tensor(tensor), name)
    return digest.hexdigest()
