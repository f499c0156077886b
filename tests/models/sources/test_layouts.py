"""Checkpoints of other programs are read as those programs write them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import save_file

from phasetrain.errors import ConfigError
from phasetrain.models.sources import WeightSource, read_source

ONE, TWO = torch.ones(2), torch.full((3,), 2.0)


def names(path: Path, **options: Any) -> tuple[str, list[str]]:
    content = read_source(WeightSource(str(path), **options))
    return content.format, sorted(content.tensors)


def reject(path: Path, **options: Any) -> str:
    """Return the error of a source that cannot be used."""
    with raises(ConfigError, code="weights.unusable") as caught:
        read_source(WeightSource(str(path), **options))
    return str(caught.value)


def vissl(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {
            "trunk": {
                "_feature_blocks.conv1.weight": value * ONE,
                "_feature_blocks.bn1.bias": value * TWO,
            },
            "heads": {"0.clf.0.weight": value * TWO},
        },
        "meta": {"config": {}},
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint with the keys of VISSL's."""
    state = {
        "train": True,
        "base_model": vissl(),
        "ema_model": vissl(3.0),
        "optimizer": {"optim": {"state": {}}},
    }
    path = tmp_path / "model_final_checkpoint_phase9.torch"
    torch.save(
        {"phase_idx": 9, "iteration": 10, "type": "checkpoint", "classy_state_dict": state}, path
    )
    return path


VISSL = [
    "heads.0.clf.0.weight",
    "trunk._feature_blocks.bn1.bias",
    "trunk._feature_blocks.conv1.weight",
]


@pytest.mark.parametrize("given", ["auto", "vissl", "torch"])
def test_vissl_checkpoint_is_read(checkpoint: Path, given: str) -> None:
    assert names(checkpoint, format=given) == ("vissl", VISSL)


def test_averaged_weights_of_vissl_are_read(checkpoint: Path) -> None:
    content = read_source(WeightSource(str(checkpoint), which="ema"))
    assert content.tensors["trunk._feature_blocks.conv1.weight"].tolist() == [3.0, 3.0]


def test_heads_of_classy_vision_are_named_by_their_block(tmp_path: Path) -> None:
    model = {
        "trunk": {"blocks.0.weight": ONE},
        "heads": {"block3-2": {"default_head": {"fc.weight": TWO}}},
    }
    torch.save({"classy_state_dict": {"base_model": {"model": model}}}, tmp_path / "a.torch")
    assert names(tmp_path / "a.torch") == (
        "vissl",
        ["heads.block3-2.default_head.fc.weight", "trunk.blocks.0.weight"],
    )


def test_other_files_are_rejected_as_vissl(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": ONE}}, tmp_path / "a.pt")
    message = reject(tmp_path / "a.pt", format="vissl")
    assert "'classy_state_dict'" in message
    assert message.endswith(" state_dict")
    torch.save({"classy_state_dict": {"base_model": {"a": ONE}}}, tmp_path / "b.pt")
    assert "classy_state_dict.base_model.model.trunk" in reject(tmp_path / "b.pt")


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        ("state_dict", {}),
        ("model", {}),
        ("model_state_dict", {}),
        ("state_dict_ema", {"which": "ema"}),
        ("ema", {"which": "ema"}),
        ("anything", {"key": "anything"}),
    ],
)
def test_common_wrappers_are_unwrapped(
    tmp_path: Path, wrapper: str, options: dict[str, Any]
) -> None:
    torch.save(
        {"epoch": 3, wrapper: {"a": ONE}, "optimizer": {"state": {0: {"momentum": TWO}}}},
        tmp_path / "a.pt",
    )
    assert names(tmp_path / "a.pt", **options) == ("torch", ["a"])


def test_missing_key_or_average_is_rejected(tmp_path: Path) -> None:
    torch.save({"nested": {"weights": {"a": ONE}}}, tmp_path / "a.pt")
    assert names(tmp_path / "a.pt", key="nested.weights") == ("torch", ["a"])
    message = reject(tmp_path / "a.pt", key="nested.weight")
    assert re.search(r"MODEL\.weights\.key = 'nested\.weight':.*'weights'", message)
    assert "state_dict_ema" in reject(tmp_path / "a.pt", which="ema")


@pytest.mark.addon("libraries")
def test_timm_checkpoint_is_read(tmp_path: Path) -> None:
    torch.save(
        {"arch": "resnet18", "state_dict": {"a": ONE}, "state_dict_ema": {"a": TWO}},
        tmp_path / "a.pth.tar",
    )
    assert names(tmp_path / "a.pth.tar", format="timm") == ("timm", ["a"])
    assert (
        read_source(WeightSource(str(tmp_path / "a.pth.tar"), format="timm", which="ema"))
        .tensors["a"]
        .tolist()
        == [2.0] * 3
    )


@pytest.mark.addon("libraries")
def test_hugging_face_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": ONE}, tmp_path / "model.safetensors")
    assert names(tmp_path) == ("huggingface", ["a"])
    assert str(tmp_path) in reject(tmp_path, which="ema")


@pytest.mark.addon("libraries")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_hugging_face_folder_is_read(tmp_path: Path, kind: str) -> None:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    files = [f"{stem}-0000{number}-of-00002.{kind}" for number in (1, 2)]
    for file, state in zip(files, ({"a": ONE}, {"b": TWO}), strict=True):
        (save_file if kind == "safetensors" else torch.save)(state, tmp_path / file)
    index = {"metadata": {}, "weight_map": {"a": files[0], "b": files[1]}}
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    assert names(tmp_path) == ("huggingface", ["a", "b"])
    (tmp_path / files[1]).unlink()
    assert f"'{files[1]}'" in reject(tmp_path)


@pytest.mark.addon("libraries")
def test_index_cannot_point_outside_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"a": ONE}, tmp_path / "a.safetensors")
    index = {"weight_map": {"a": "../a.safetensors"}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'../a.safetensors'" in reject(tmp_path / "in")


def test_other_folders_and_missing_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    assert str(tmp_path) in reject(tmp_path)
    assert "'notes.txt'" in reject(tmp_path / "note.txt")


def test_torch_file_is_rejected_if_the_format_is_safetensors(tmp_path: Path) -> None:
    torch.save({"a": ONE}, tmp_path / "a.safetensors")
    assert "format = 'safetensors':" in reject(tmp_path / "a.safetensors", format="safetensors")
