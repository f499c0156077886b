"""Digests of file contents: a tree of SHA-256, which hashes large files on several cores."""

import os
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
    return [view[at : at + BLOCK] for at in range(0, len(view), BLOCK)]


class TreeHasher:
    """Hashes blocks in threads while the caller reads or writes the next; a context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
        self._leaves: list[Future[bytes]] = []

    def __enter__(self) -> "TreeHasher":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def add(self, block: memoryview) -> None:
        """Hash the next block; it must not change until `digest` has returned."""
        # hashlib releases the GIL for large buffers, so threads are enough.
        self._leaves.append(self._pool.submit(lambda: sha256(block).digest()))

    def digest(self) -> str:
        """Return SHA-256 over the SHA-256 digests of the blocks, hexadecimal."""
        return sha256(b"".join(leaf.result() for leaf in self._leaves)).hexdigest()


def tree_digest(data: Data) -> str:
    """Return SHA-256 over the SHA-256 digests of the 64 MiB blocks of `data`, hexadecimal."""
    with TreeHasher() as hasher:
        for block in split_blocks(data):
            hasher.add(block)
        return hasher.digest()
