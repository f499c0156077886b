"""The SHA-256 of the weights of a model, by which runs are compared."""

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor, nn

from phasetrain.distributed.dtensors import full_tensor


def hash_model(model: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of a model's state, sorted by name."""
    return hash_state(model.state_dict())


def hash_state(state: Mapping[str, Tensor]) -> str:
    """Return the digest of a model with this state; if it is sharded, all ranks have to call."""
    digest = sha256()
    for name, tensor in sorted(state.items()):
        flat = full_tensor(tensor).cpu().contiguous()
        digest.update(f"{name} {flat.dtype} {tuple(flat.shape)};".encode())
        if flat.numel():
            # As bytes: NumPy has no bfloat16, and NaNs and negative zeros count as they are.
            digest.update(flat.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
