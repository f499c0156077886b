"""Digests of file contents: a tree of SHA-256, which hashes large files on several cores."""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256

BLOCK = 64 * 2**20
"""Bytes per leaf of the tree; part of the format, as another size gives other digests."""

Data = bytes | bytearray | memoryview


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of a file, as in a manifest.

    Attributes:
        size: bytes.
        digest: `tree_digest` of the content, hexadecimal.
    """

    size: int
    digest: str


def split_blocks(data: Data) -> list[memoryview]:
    """Split `data` into blocks of 64 MiB; the last one may be shorter."""
    view = memoryview(data).cast("B")
    return [view[start:end] for start, end in leaf_ranges(len(view))]


def leaf_ranges(size: int) -> list[tuple[int, int]]:
    """Return the first byte and the end of each block of a file."""
    return [(at, min(at + BLOCK, size)) for at in range(0, size, BLOCK)]


class TreeHasher:
    """Hashes leaves in threads while the caller reads or writes the next; a context manager."""

    def __init__(self) -> None:
        self._threads = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(max_workers=self._threads)
        self._leaves: list[Future[bytes]] = []
        self._pieces: list[memoryview] = []
        self._filled = 0

    def __enter__(self) -> "TreeHasher":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def add(self, data: memoryview) -> None:
        """Hash the next bytes; they must not change until `digest` has returned."""
        at = 0
        while at < len(data):
            piece = data[at : at + BLOCK - self._filled]
            self._pieces.append(piece)
            self._filled += len(piece)
            at += len(piece)
            if self._filled == BLOCK:
                self._submit_leaf()

    def digest(self) -> str:
        """Return SHA-256 over the SHA-256 digests of the blocks, hexadecimal."""
        if self._pieces:
            self._submit_leaf()
        return hash_leaves(leaf.result() for leaf in self._leaves)

    def _submit_leaf(self) -> None:
        # hashlib releases the GIL for large buffers, so threads are enough.
        self._leaves.append(self._pool.submit(_hash_pieces, self._pieces))
        self._pieces = []
        self._filled = 0
        # Leaves that wait keep their bytes in memory: a fast disk must not run far ahead.
        if len(self._leaves) > 2 * self._threads:
            self._leaves[-2 * self._threads].result()


def hash_leaves(leaves: Iterable[bytes]) -> str:
    """Return the `tree_digest` of a file from the SHA-256 digests of its 64 MiB blocks."""
    return sha256(b"".join(leaves)).hexdigest()


def tree_digest(data: Data) -> str:
    """Return SHA-256 over the SHA-256 digests of the 64 MiB blocks of `data`, hexadecimal."""
    with TreeHasher() as hasher:
        for block in split_blocks(data):
            hasher.add(block)
        return hasher.digest()


def _hash_pieces(pieces: Iterable[memoryview]) -> bytes:
    leaf = sha256()
    for piece in pieces:
        leaf.update(piece)
    return leaf.digest()
