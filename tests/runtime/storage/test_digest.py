"""Digests are a tree of SHA-256 over blocks of 64 MiB."""

import math
from hashlib import sha256

import pytest

from phasetrain.runtime.storage import digest, tree_digest
from phasetrain.runtime.storage.digest import TreeHasher, split_blocks


def test_of_nothing_and_of_a_little() -> None:
    assert tree_digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    # SHA-256 of the 32 bytes that are SHA-256 of "abc"
    assert tree_digest(b"abc") == "4f8b42c22dd3729b519ba6f68d2da7cc5b2d606d05daed5ad5128cc03e6c6358"


def test_a_tree_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", 2)
    leaves = [sha256(block).digest() for block in (b"ab", b"cd", b"e")]
    assert tree_digest(b"abcde") == sha256(b"".join(leaves)).hexdigest()


def test_blocks_of_any_kind_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BLOCK", 3)
    for data in (b"abcdefgh", bytearray(b"abcdefgh"), memoryview(b"abcdefgh").cast("I")):
        assert [bytes(block) for block in split_blocks(data)] == [b"abc", b"def", b"gh"]
    assert split_blocks(b"") == []


def test_the_order_of_blocks_counts() -> None:
    found = set()
    for order in ([b"a", b"b"], [b"b", b"a"], [b"ab"]):
        with TreeHasher() as hasher:
            for block in order:
                hasher.add(memoryview(block))
            found.add(hasher.digest())
    assert len(found) == 2  # how the content is cut into pieces does not count


@pytest.mark.slow
def test_more_than_one_block_of_the_real_size() -> None:
    data = bytearray(digest.BLOCK + 1)
    leaves = [sha256(data[: digest.BLOCK]).digest(), sha256(data[digest.BLOCK :]).digest()]
    assert math.ceil(len(data) / digest.BLOCK) == 2
    assert tree_digest(data) == sha256(b"".join(leaves)).hexdigest()
