"""Files are read as data: no code in them is executed, and damage is detected."""

import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import save_file

from phasetrain.errors import ConfigError
from phasetrain.models.sources import WeightSource, read_source
from phasetrain.models.sources.files import flatten_tensors

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b.c": torch.tensor(7, dtype=torch.bfloat16)}


class Hostile:
    """What creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def equal(found: object, expected: dict[str, torch.Tensor]) -> bool:
    assert isinstance(found, dict)
    assert found.keys() == expected.keys()
    return all(
        torch.equal(found[name], one) and found[name].dtype == one.dtype
        for name, one in expected.items()
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_file_is_read(tmp_path: Path, *, legacy: bool) -> None:
    torch.save(STATE, tmp_path / "a.bin", _use_new_zipfile_serialization=not legacy)
    content = read_source(WeightSource(str(tmp_path / "a.bin")))
    assert (content.format, len(content.digest)) == ("torch", 64)
    assert equal(content.tensors, STATE)


def test_safetensors_file_is_recognized_by_its_content(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.bin")
    content = read_source(WeightSource(str(tmp_path / "weights.bin")))
    assert content.format == "safetensors"
    assert equal(content.tensors, STATE)
    assert equal(
        read_source(WeightSource(str(tmp_path / "weights.bin"), format="safetensors")).tensors,
        STATE,
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_torch_file_is_not_executed(tmp_path: Path, *, legacy: bool) -> None:
    mark, path = tmp_path / "executed", tmp_path / "a.pt"
    torch.save(
        {"state_dict": STATE, "more": Hostile(mark)},
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(path)))
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the control: it is hostile
    assert mark.exists()


def test_code_in_a_pickle_is_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(path)))
    assert not (tmp_path / "executed").exists()


def test_namespace_next_to_the_weights_is_accepted(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "args": Namespace(lr=0.1), "epoch": 3}, tmp_path / "a.pt")
    assert equal(read_source(WeightSource(str(tmp_path / "a.pt"))).tensors, STATE)


@pytest.mark.parametrize("where", [0.3, 0.6])
def test_flipped_bit_in_a_torch_file_is_detected(tmp_path: Path, where: float) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(4096.0)}, path)
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path)["a"], torch.arange(4096.0))  # torch itself says nothing
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(path)))


@pytest.mark.parametrize(
    "content", [b"", b"PK\3\4" + b"x" * 40, b"\x20\0\0\0\0\0\0\0{" + b"x" * 40]
)
def test_files_of_other_formats_are_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with raises(ConfigError, code="weights.unusable", key="MODEL.weights.path"):
        read_source(WeightSource(str(tmp_path / "a")))


def test_file_without_a_mapping_is_rejected(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "a.pt")
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(tmp_path / "a.pt")))


def test_nested_mappings_get_dotted_names() -> None:
    found = flatten_tensors(
        {"a": {"b": torch.ones(1), "epoch": 3}, "c": torch.zeros(2), 0: {"d": torch.ones(3)}}
    )
    assert {name: one.shape[0] for name, one in found.items()} == {"a.b": 1, "c": 2, "0.d": 3}
