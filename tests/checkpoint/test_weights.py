"""Weights out of checkpoints of ours: the newest, the best, and what cannot be used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.checkpoint import Checkpointer, Facts
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.models.sources import WeightSource, read_source
from phasetrain.runtime.storage import Storage


def save(folder: Path, step: int, monitor: str | None = "test/accuracy", **facts: Any) -> str:
    """Commit a checkpoint whose weights are its step, and return its folder."""
    config = {"CHECKPOINT": {"best": {"monitor": monitor}}}
    task = {"model": {"layer": {"weight": torch.full((2,), float(step))}}}
    saved = Checkpointer(f"{folder}/checkpoints", Storage()).save(
        RunState(step=step, updates=step), {"task": task}, {"config": config}, Facts(**facts)
    )
    return f"{folder}/checkpoints/{saved.name}"


def weight(path: str | Path, **options: Any) -> float:
    content = read_source(WeightSource(str(path), **options))
    assert (content.format, list(content.tensors)) == ("phasetrain", ["layer.weight"])
    return float(content.tensors["layer.weight"][0])


def test_a_run_its_checkpoints_and_one_of_them(tmp_path: Path) -> None:
    first = save(tmp_path, 1, metrics={"test/accuracy": 0.9})
    save(tmp_path, 2, metrics={"test/accuracy": 0.5})
    assert [weight(path) for path in (tmp_path, tmp_path / "checkpoints", first)] == [2.0, 2.0, 1.0]
    assert weight(tmp_path, checkpoint="best") == 1.0


def test_what_is_damaged_is_passed_over_or_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = Path(save(tmp_path, 2), "tensors.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weight(tmp_path) == 1.0
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(path.parent)))


def test_weights_that_are_no_numbers_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, healthy=False)
    assert weight(tmp_path) == 1.0


def test_what_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(tmp_path), which="ema"))
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(tmp_path), checkpoint="best"))
    save(tmp_path / "plain", 1, monitor=None)
    for where, told in (
        ("MODEL.weights", "MODEL.weights.checkpoint='latest'"),
        ("", "checkpoint='latest'"),
    ):
        path = f"{where}.path = " if where else ""
        with pytest.raises(
            ConfigError,
            match=rf"^{path}'.*plain': .* had no CHECKPOINT.best.monitor; take {told}, or",
        ):
            read_source(WeightSource(str(tmp_path / "plain"), checkpoint="best", where=where))
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with raises(ConfigError, key="MODEL.weights.path"):
        read_source(WeightSource(str(tmp_path / "empty")))
