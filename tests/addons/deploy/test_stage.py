"""Exports, packs and predictions of a checkpoint describe the inputs of its stage."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import phasetrain
from phasetrain.addons.deploy.export import export
from phasetrain.addons.deploy.pack.archive import read_archive
from phasetrain.addons.deploy.predict.predict import predict
from phasetrain.cli import main

STAGES = "PHASES.stages=[{updates: 2}, {updates: 2, DATA: {TEST: {transforms: [{name: resize, size: 16}]}}}]"
WORDS = (
    "PHASES={epochs: null, limit: {test: 1}}",
    "DATA.TRAIN.transforms=[]",
    "DATA.TEST.transforms=[{name: normalize, mean: [0.5], std: [0.25]}]",
    "MODEL.width=4",
    "HOOKS.console=null",
    "CHECKPOINT={keep_last: 9, every_updates: 2}",
)
NORMALIZE = "normalize(mean=[0.5], std=[0.25])"
RESIZE = "resize(size=16)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "run"
    phasetrain.run([*WORDS, STAGES, f"RUN.dir={folder}"])
    return folder


EXPECTED = pytest.mark.parametrize(
    ("name", "transform", "size"),
    [("p0000-s00000002", NORMALIZE, 8), ("p0002-s00000002", RESIZE, 16)],
)


@EXPECTED
@pytest.mark.feature(
    "export.stage",
    "exports and packs have the transforms and the input of the stage of their checkpoint",
    "`phasetrain export`, `phasetrain pack`, `PHASES.stages`",
)
def test_export_has_the_transforms_of_the_stage(
    folder: Path, tmp_path: Path, name: str, transform: str, size: int
) -> None:
    path = f"{folder}/checkpoints/{name}"
    made = export(path, str(tmp_path / "a.safetensors"))
    assert made.outside == [transform]
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert json.loads(file.metadata()["transforms"]) == [transform]
    made = export(path, str(tmp_path / "a.pt2"))
    assert (made.outside, made.input) == ([transform], f"float32 (N, 1, {size}, {size})")


@EXPECTED
@pytest.mark.feature("export.stage")
def test_pack_has_the_transforms_of_the_stage(
    folder: Path, tmp_path: Path, name: str, transform: str, size: int
) -> None:
    path = f"{folder}/checkpoints/{name}"
    phasetrain.pack(path, tmp_path / "a.zip")
    packed = phasetrain.load_pack(tmp_path / "a.zip")
    inputs = torch.linspace(0, 1, 2 * 64).view(2, 1, 8, 8)
    assert packed.transform(inputs).shape == (2, 1, size, size)
    assert packed.predict(inputs).equal(phasetrain.load(path).predict(inputs, transform=True))
    assert packed.card["transforms"] == [transform]
    split = packed.card["data"]["test"]
    assert (split["transforms"], split["facts"]["input_shape"]) == (
        [transform.partition("(")[0]],
        [1, size, size],
    )
    page = bytes(read_archive(str(tmp_path / "a.zip")).find_member("card.md")).decode()
    assert f"shape (1, {size}, {size}) after the transforms" in page


@EXPECTED
@pytest.mark.feature("export.stage")
def test_features_are_those_of_the_stage(
    folder: Path, tmp_path: Path, name: str, transform: str, size: int
) -> None:
    path = f"{folder}/checkpoints/{name}"
    command = ["extract", path, "EXTRACT.splits=[test]", f"EXTRACT.dir={tmp_path / 'out'}"]
    assert main(command) == 0
    index = json.loads((tmp_path / "out" / "test" / "index.json").read_text())
    [recorded] = index["request"]["DATA.TEST.transforms"]
    assert recorded["name"] == transform.partition("(")[0]


@pytest.mark.feature("export.stage")
def test_transforms_of_the_command_replace_those_of_the_stage(folder: Path, tmp_path: Path) -> None:
    word = "DATA.TEST.transforms=[{name: resize, size: 12}]"
    for changes in (word, word.replace(".transforms=", "={transforms: ") + "}"):
        task = phasetrain.load(folder, changes=[changes])
        assert task.transform([torch.zeros(1, 8, 8)]).shape == (1, 1, 12, 12)
    made = export(str(folder), str(tmp_path / "a.pt2"), overrides=[word])
    assert (made.outside, made.input) == (["resize(size=12)"], "float32 (N, 1, 12, 12)")


@pytest.mark.feature("predict.images")
def test_array_of_one_sample_is_no_batch_in_a_later_stage(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros((1, 8, 8), np.float32))
    [found] = predict(str(folder), [str(tmp_path / "one.npy")])
    assert len(found.classes) == 3
