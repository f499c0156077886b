"""Checkpoints in several files, made by hand: of two processes with rows of a matrix, and a number
of the first."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.addons.sharding.checkpoint import ShardedTensors
from phasetrain.checkpoint import Checkpointer, Facts, Manifest
from phasetrain.checkpoint.commit import MANIFEST, SHARDED, read_manifest
from phasetrain.checkpoint.snapshot import Snapshot
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NoValidCheckpointError
from phasetrain.runtime.storage import FileRecord, Storage, tree_digest

FIRST, SECOND = "tensors-00001-of-00002.safetensors", "tensors-00002-of-00002.safetensors"
WEIGHT, STEP = "task.model.weight", "task.step"
TREE = {"task": {"model": {"weight": {"$tensor": WEIGHT}}, "step": {"$tensor": STEP}}, "hooks": {}}
INDEX: dict[str, Any] = {
    "tensors": {
        WEIGHT: {
            "dtype": "F32",
            "shape": [3, 2],
            "chunks": [
                {"file": FIRST, "offsets": [0, 0], "sizes": [2, 2]},
                {"file": SECOND, "offsets": [2, 0], "sizes": [1, 2]},
            ],
        },
        STEP: {
            "dtype": "I64",
            "shape": [],
            "chunks": [{"file": FIRST, "offsets": [], "sizes": []}],
        },
    }
}


def made(folder: Path, index: dict[str, Any] = INDEX) -> Path:
    """Write the checkpoint."""
    folder.mkdir(parents=True)
    contents = {
        FIRST: bytes(
            Snapshot().copy_tensors(
                [(WEIGHT, torch.tensor([[0.0, 1.0], [2.0, 3.0]])), (STEP, torch.tensor(9))]
            )
        ),
        SECOND: bytes(Snapshot().copy_tensors([(WEIGHT, torch.tensor([[4.0, 5.0]]))])),
        "state.json": json.dumps(TREE).encode(),
        "promised.json": b"{}",
        "shards.json": json.dumps(index).encode(),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = {
        name: FileRecord(len(content), tree_digest(content)) for name, content in contents.items()
    }
    manifest = Manifest(SHARDED, 1, "run", None, RunState().state_dict(), files, Facts())
    (folder / MANIFEST).write_bytes(manifest.encode())
    return folder


def load(folder: Path) -> dict[str, Any]:
    return Checkpointer(str(folder.parent), Storage()).load(str(folder)).state


def test_shards_are_assembled(tmp_path: Path) -> None:
    state = load(made(tmp_path / "p0000-s00000000"))

    assert state["task"]["model"]["weight"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert state["task"]["step"].tolist() == 9


def test_a_tensor_is_read_into_its_target_without_opening_other_files(
    tmp_path: Path,
) -> None:
    folder = made(tmp_path / "p0000-s00000000")
    manifest = read_manifest(Storage(), str(folder))
    shards = ShardedTensors(
        Storage(), str(folder), manifest, "full", bytearray((folder / "shards.json").read_bytes())
    )
    target = torch.zeros(3, 2)

    state = shards.read_state(
        (folder / "state.json").read_bytes(),
        lambda saved: [(saved["task"]["model"]["weight"], target)],
    )
    assert state["task"]["model"]["weight"] is target
    assert target.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]

    (folder / SECOND).unlink()
    step = torch.tensor(0)
    shards.read_into({STEP: step})
    assert step.item() == 9


@pytest.mark.parametrize("file", [FIRST, SECOND])
def test_a_missing_or_damaged_file_is_refused(tmp_path: Path, file: str) -> None:
    folder = made(tmp_path / "p0000-s00000000")
    content = bytearray((folder / file).read_bytes())
    content[-1] ^= 1
    (folder / file).write_bytes(content)
    with raises(ConfigError, code="checkpoint.unusable", key="RUN.checkpoint"):
        load(folder)

    (folder / file).unlink()
    with raises(ConfigError, code="checkpoint.unusable", key="RUN.checkpoint"):
        load(folder)


def test_a_file_that_the_manifest_does_not_name_is_not_looked_at(tmp_path: Path) -> None:
    folder = made(tmp_path / "p0000-s00000000")
    (folder / "tensors-00003-of-00003.safetensors").write_bytes(b"of another save")

    assert load(folder)["task"]["step"].item() == 9


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    index = json.loads(json.dumps(INDEX))
    at = index["tensors"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return index


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (
            changed([WEIGHT, "chunks", 1, "file"], "elsewhere"),
            {"code": "checkpoint.unusable", "key": "RUN.checkpoint"},
        ),
        (
            changed([WEIGHT, "shape"], [4, 2]),
            {"code": "checkpoint.unusable", "key": "RUN.checkpoint"},
        ),
        (
            changed([WEIGHT, "dtype"], "PICKLE"),
            {"code": "checkpoint.unusable", "key": "RUN.checkpoint"},
        ),
        (
            changed([WEIGHT, "chunks", 0, "sizes"], [3, 2]),
            {"code": "checkpoint.unusable", "key": "RUN.checkpoint"},
        ),
        (changed([WEIGHT, "chunks"], 3), {"code": "checkpoint.unusable", "key": "RUN.checkpoint"}),
        (
            changed([WEIGHT, "chunks", 1, "file"], FIRST),
            {"code": "checkpoint.unusable", "key": "RUN.checkpoint"},
        ),
        (
            changed([STEP, "chunks", 0, "file"], SECOND),
            {"code": "checkpoint.unusable", "key": "RUN.checkpoint"},
        ),
        ({"tensors": {}}, {"code": "checkpoint.unusable", "key": "RUN.checkpoint"}),
        ({}, {"code": "checkpoint.unusable", "key": "RUN.checkpoint"}),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, index: dict[str, Any], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        load(made(tmp_path / "p0000-s00000000", index))


def test_a_resume_passes_over_what_is_damaged(tmp_path: Path) -> None:
    folder = made(tmp_path / "checkpoints" / "p0000-s00000000")
    (folder / SECOND).unlink()

    with pytest.raises(NoValidCheckpointError, match=SECOND):
        Checkpointer(str(folder.parent), Storage()).load_newest()
