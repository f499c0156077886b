"""Fingerprints of the datasets of torch, which cannot say themselves whether they have changed."""

from hashlib import sha256
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from phasetrain.data.protocols import Fingerprinted
from phasetrain.proof.digest import hash_tensors


def hash_dataset(dataset: Any) -> str | None:
    """Return the fingerprint of a dataset; None if it has none, and is none of torch's.

    The fingerprint of a `Subset` has its indices, and of a part of a `Subset` or `ConcatDataset`
    without a fingerprint the name of the class and the length.
    """
    if isinstance(dataset, Fingerprinted):
        return dataset.fingerprint()
    if isinstance(dataset, TensorDataset):
        return hash_tensors(*dataset.tensors)
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices)
        digest = sha256(f"subset of {_hash_part(dataset.dataset)};".encode())
        if indices.dtype.kind in "iu":
            digest.update(indices.astype(np.int64).tobytes())
        else:
            digest.update(repr(list(dataset.indices)).encode())
        return digest.hexdigest()
    if isinstance(dataset, ConcatDataset):
        return sha256(f"all of {[*map(_hash_part, dataset.datasets)]}".encode()).hexdigest()
    return None


def _hash_part(dataset: Any) -> str:
    return hash_dataset(dataset) or f"{type(dataset).__qualname__}:{len(dataset)}"
