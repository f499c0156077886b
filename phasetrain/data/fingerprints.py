"""Fingerprints of the datasets of torch, which cannot say themselves whether they have changed."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from phasetrain.data.protocols import Fingerprinted
from phasetrain.proof.digest import hash_tensors

BLOCK, BLOCKS = 4096, 256
"""Bytes of a block, and number of blocks, that are read of a mapped file; a file with fewer bytes
is read whole. Of a list, as many entries are looked at."""


def hash_dataset(dataset: Any) -> str | None:
    """Return the fingerprint of a dataset; None if it has none, and is none of torch's.

    The fingerprint of a `Subset` has its indices, and of a part of a `Subset` or `ConcatDataset`
    without a fingerprint the name of the class and the length. A dataset with memory maps of NumPy
    among its attributes has the sizes and a sample of the bytes of their files.
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
    return _hash_mapped_files(dataset)


def _hash_mapped_files(dataset: Any) -> str | None:
    """Return a digest of the files behind the memory maps in the attributes of a dataset."""
    digest = sha256(f"{type(dataset).__qualname__}:".encode())
    paths = [
        Path(array.filename)
        for value in getattr(dataset, "__dict__", {}).values()
        for array in (value[:BLOCKS] if isinstance(value, list | tuple) else [value])
        if isinstance(array, np.memmap) and array.filename and Path(array.filename).is_file()
    ]
    for path in paths:
        # Not its modification time: a copy of the file on another disk is the same data.
        size = path.stat().st_size
        digest.update(f"{size};".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(BLOCK, size // BLOCKS)):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest() if paths else None


def _hash_part(dataset: Any) -> str:
    return hash_dataset(dataset) or f"{type(dataset).__qualname__}:{len(dataset)}"
