"""A snapshot is a safetensors file in kept memory; hostile files are refused and change nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import load, load_file
from safetensors.torch import save as save_tensors
from torch import Tensor

from phasetrain.checkpoint.codec import decode
from phasetrain.checkpoint.snapshot import DTYPES, Snapshot, has_nan, parse_safetensors
from phasetrain.errors import InvalidCheckpointError


def filled(dtype: torch.dtype, *shape: int) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count) % 2 + (1 if dtype != torch.bool else 0)).to(dtype).view(shape)


TENSORS: dict[str, Tensor] = {
    **{str(dtype): filled(dtype, 3) for dtype in DTYPES},
    "none": torch.zeros(0),
    "none of a shape": torch.zeros(2, 0, 3, dtype=torch.int16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "sliced": torch.arange(20)[3:11:2],
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": torch.tensor([7.0]).expand(4),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "odd": torch.arange(3, dtype=torch.uint8),
}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Tell whether two sets of tensors are equal in names, types, shapes and bytes."""
    if one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in one]
    if any((a.dtype, a.shape) != (b.dtype, b.shape) for a, b in pairs):
        return False
    return all(raw(a) == raw(b) for a, b in pairs)


def raw(tensor: Tensor) -> list[int]:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


class TestFormat:
    def test_the_library_reads_the_bytes(self) -> None:
        assert same(load(bytes(Snapshot().copy_tensors(list(TENSORS.items())))), TENSORS)

    def test_the_library_reads_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.safetensors").write_bytes(Snapshot().copy_tensors(list(TENSORS.items())))
        assert same(load_file(tmp_path / "a.safetensors"), TENSORS)

    def test_files_of_the_library_are_read(self) -> None:
        plain = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            for name, tensor in TENSORS.items()
        }
        assert same(
            parse_safetensors(bytearray(save_tensors(plain, metadata={"by": "somebody"}))), TENSORS
        )

    def test_a_comparison_that_sees_differences(self) -> None:
        assert not same({"a": torch.zeros(1)}, {"a": -torch.zeros(1)})
        assert not same({"a": torch.zeros(1)}, {"a": torch.zeros(1, 1)})
        assert not same({"a": torch.zeros(1)}, {"b": torch.zeros(1)})

    def test_every_tensor_lies_on_its_own_boundary(self) -> None:
        found = parse_safetensors(bytearray(Snapshot().copy_tensors(list(TENSORS.items()))))
        assert [
            name for name, t in found.items() if t.numel() and t.data_ptr() % t.element_size()
        ] == []

    def test_nothing_at_all(self) -> None:
        assert load(bytes(Snapshot().copy_tensors([]))) == {}
        assert parse_safetensors(bytearray(Snapshot().copy_tensors([]))) == {}


class TestMemory:
    def test_it_is_kept_and_holds_the_new_values(self) -> None:
        snapshot, weight = Snapshot(), torch.zeros(1000)
        first = parse_safetensors(snapshot.copy_tensors([("weight", weight)]))["weight"]
        place = first.data_ptr()
        weight += 1
        assert first.sum() == 0  # it stays as it is until the next one is taken
        second = parse_safetensors(snapshot.copy_tensors([("weight", weight)]))["weight"]
        assert (second.data_ptr(), second.sum().item()) == (place, 1000.0)
        assert place != weight.data_ptr()

    def test_another_value_of_the_same_layout_needs_no_new_header(self) -> None:
        snapshot = Snapshot()
        one = bytes(snapshot.copy_tensors([("a", torch.ones(2)), ("b", torch.zeros(3))]))
        assert bytes(snapshot.copy_tensors([("a", torch.ones(2)), ("b", torch.zeros(3))])) == one

    @pytest.mark.parametrize(
        "other",
        [
            {"weight": torch.ones(5)},
            {"weight": torch.ones(4, dtype=torch.int32)},
            {"weight": torch.ones(2, 2)},
            {"other!": torch.ones(4)},
            {"weight": torch.ones(4), "more": torch.ones(1)},
            {},
        ],
        ids=["size", "type", "shape", "name", "number", "none"],
    )
    def test_another_layout_is_arranged_anew(self, other: dict[str, Tensor]) -> None:
        snapshot = Snapshot()
        snapshot.copy_tensors([("weight", torch.zeros(4))])
        assert same(load(bytes(snapshot.copy_tensors(list(other.items())))), other)
        assert same(
            load(bytes(snapshot.copy_tensors([("weight", torch.zeros(4))]))),
            {"weight": torch.zeros(4)},
        )


def file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FOUR = b"\0\0\x80\x3f"
HOSTILE = {
    "empty": b"",
    "short": b"\x02\0\0\0",
    "header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "header beyond all memory": (2**63).to_bytes(8, "little") + b"{}",
    "header that is no JSON": file(b"\x80\x04\x95pickle"),
    "header that is a list": file([]),
    "header that is a number": file(3),
    "nested without end": file(b"[" * 100_000),
    "nested deeply": file(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a long number": file(
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 6000 + b'], "data_offsets": [0, 4]}}', FOUR
    ),
    "name twice": file(
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        FOUR * 2,
    ),
    "entry that is no mapping": file({"a": 1}, FOUR),
    "no type": file({"a": {"shape": [1], "data_offsets": [0, 4]}}, FOUR),
    "unknown type": file({"a": entry("F99")}, FOUR),
    "type that is a list": file({"a": entry([])}, FOUR),
    "shape that is no list": file({"a": entry(shape=1)}, FOUR),
    "shape that is text": file({"a": entry(shape="1")}, FOUR),
    "shape of fractions": file({"a": entry(shape=[1.0])}, FOUR),
    "shape of truths": file({"a": entry(shape=[True])}, FOUR),
    "negative shape": file({"a": entry(shape=[-1, -1])}, FOUR),
    "huge shape": file({"a": entry(shape=[2**62, 4])}, FOUR),
    "huge empty shape": file({"a": entry(shape=[0, 2**62, 8], offsets=[0, 0])}),
    "empty shape beyond numbers": file({"a": entry(shape=[0, 10**30], offsets=[0, 0])}),
    "shape of another size": file({"a": entry(shape=[2])}, FOUR),
    "one offset": file({"a": entry(offsets=[0])}, FOUR),
    "three offsets": file({"a": entry(offsets=[0, 4, 8])}, FOUR),
    "negative offset": file({"a": entry(offsets=[-4, 0])}, FOUR),
    "offset beyond the file": file({"a": entry(offsets=[4, 8])}, FOUR),
    "huge offset": file({"a": entry(offsets=[2**63, 2**63 + 4])}, FOUR),
    "offsets the wrong way": file({"a": entry(offsets=[4, 0])}, FOUR),
    "offsets that are truths": file({"a": entry("U8", [1], [False, True])}, b"\0"),
    "overlapping": file({"a": entry(), "b": entry(offsets=[0, 4])}, FOUR),
    "overlapping in part": file({"a": entry(), "b": entry(offsets=[2, 6])}, FOUR * 2),
    "with a gap": file({"a": entry(), "b": entry(offsets=[8, 12])}, FOUR * 3),
    "more than its tensors": file({"a": entry()}, FOUR + b"\0"),
    "less than its tensors": file({"a": entry()}, FOUR[:3]),
}


class TestHostile:
    @pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
    def test_it_is_refused(self, data: bytes) -> None:
        with raises(InvalidCheckpointError, code="checkpoint.invalid"):
            decode(b"{}", data)

    def test_the_sound_one_is_read(self) -> None:
        sound = file({"a": entry(), "b": entry(shape=[], offsets=[4, 8])}, FOUR * 2)
        assert {
            name: tensor.tolist() for name, tensor in parse_safetensors(bytearray(sound)).items()
        } == {
            "a": [1.0],
            "b": 1.0,
        }

    @pytest.mark.parametrize(
        "name", ["overlapping", "with a gap", "more than its tensors", "name twice"]
    )
    def test_as_the_library_does(self, name: str) -> None:
        with pytest.raises(Exception, match="rror while deserializing"):
            load(HOSTILE[name])


class TestHealth:
    @pytest.mark.parametrize(
        ("tensors", "found"),
        [
            ({"model.weight": torch.tensor([1.0, math.nan, 2.0])}, True),
            ({"model.weight": torch.tensor([[math.nan]], dtype=torch.bfloat16)}, True),
            ({"model.weight": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)}, True),
            ({"model.weight": torch.tensor([1, complex(1, math.nan)])}, True),
            ({"model.weight": torch.tensor([1, 2j])}, False),
            ({"model.weight": torch.tensor([1.0, math.inf, -math.inf])}, False),
            ({"other.weight": torch.tensor([math.nan])}, False),
            (
                {
                    "model.count": torch.tensor([3]),
                    "model.none": torch.zeros(0),
                    "model.on": torch.tensor(True),
                },
                False,
            ),
            ({}, False),
        ],
    )
    def test_of_a_model(self, tensors: dict[str, Tensor], found: bool) -> None:
        assert has_nan(Snapshot().copy_tensors(list(tensors.items())), "model.") is found
