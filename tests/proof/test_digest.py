"""The digests in checkpoints, ledgers and status.json keep the bytes that they are defined over."""

from hashlib import sha256

import pytest
import torch
from torch import Tensor

from phasetrain.models.digest import hash_state
from phasetrain.proof.digest import digest_leaves, hash_tensors, sum_bits, view_bytes

MATRIX = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("tensor", "text", "content"),
    [
        (MATRIX.t(), "torch.float32 (3, 2);", "00000000000040400000803f00008040000000400000a040"),
        (torch.tensor(3), "torch.int64 ();", "0300000000000000"),
        (torch.zeros(0, 4), "torch.float32 (0, 4);", ""),
        (torch.ones(2, dtype=torch.bfloat16), "torch.bfloat16 (2,);", "803f803f"),
        (torch.tensor([True, False]), "torch.bool (2,);", "0100"),
        (torch.tensor([-0.0]), "torch.float32 (1,);", "00000080"),
        # A single element counts as contiguous with any stride.
        (MATRIX[:1, 2], "torch.float32 (1,);", "00000040"),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
def test_digest_is_over_name_type_shape_and_bytes(tensor: Tensor, text: str, content: str) -> None:
    data = bytes.fromhex(content)
    assert view_bytes(tensor).numpy().tobytes() == data
    assert hash_tensors(tensor) == sha256(text.encode() + data).hexdigest()
    assert hash_state({"w": tensor}) == sha256(f"w {text}".encode() + data).hexdigest()


def test_values_of_a_release_stay() -> None:
    state = {"b": torch.tensor(3), "a": MATRIX}
    assert hash_state(state)[:16] == "8a588a336a577865"
    assert hash_tensors(MATRIX, torch.tensor(3))[:16] == "8f17d0e313376b67"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_sum_of_bits_shows_a_single_flipped_bit(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 2, 3], dtype=dtype)
    flipped = tensor.clone()
    view_bytes(flipped)[-1] ^= 1
    assert int(sum_bits(flipped)) != int(sum_bits(tensor)) == int(sum_bits(tensor.clone()))


def test_digests_name_every_leaf() -> None:
    digests = digest_leaves({"a": [1, torch.zeros(2)], "b": {}, "c": float("nan")}, "state")
    assert list(digests) == ["state.a.0", "state.a.1", "state.b", "state.c"]
    assert digests["state.a.0"] != digests["state.b"]
