"""Weights of VISSL with NumPy arrays and its own dictionaries become tensors."""

import pickle
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.addons.vissl.weights import convert_weights
from phasetrain.cli import main
from phasetrain.errors import ConfigError
from phasetrain.models.sources import parse_sources, read_source


@pytest.fixture
def vissl_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with NumPy arrays in VISSL's dictionary, as VISSL's tools write it."""
    module = ModuleType("vissl.utils.hydra_config")
    kind = type("AttrDict", (dict,), {"__module__": module.__name__})
    module.AttrDict = kind  # type: ignore[attr-defined]
    for name in ("vissl", "vissl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    trunk = {"_feature_blocks.conv1.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    heads = {"0.clf.0.bias": torch.ones(2)}
    state = {"base_model": {"model": {"trunk": trunk, "heads": heads}}, "lr": np.float64(0.1)}
    config = kind({"SEED_VALUE": 1, "DATA": kind({"NUM": np.int64(3)})})
    path = tmp_path / "model.torch"
    torch.save({"classy_state_dict": state, "config": config, "iteration": 3}, path)
    return path


@pytest.mark.feature(
    "vissl.weights", "weights of VISSL with NumPy arrays", "`phasetrain migrate vissl-weights`"
)
def test_arrays_become_tensors_that_model_weights_reads(vissl_file: Path, tmp_path: Path) -> None:
    source, *_ = parse_sources({"path": str(vissl_file)})
    with raises(ConfigError):  # without the command
        read_source(source)
    out = tmp_path / "model.pt"
    assert main(["migrate", "vissl-weights", str(vissl_file), "--out", str(out)]) == 0
    tensors = read_source(parse_sources({"path": str(out)})[0]).tensors
    assert sorted(tensors) == ["heads.0.clf.0.bias", "trunk._feature_blocks.conv1.weight"]
    assert tensors["trunk._feature_blocks.conv1.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


class Danger:
    """Executes code when it is unpickled."""

    def __reduce__(self) -> object:
        return (print, ("executed",))


def test_other_files_are_rejected_and_no_code_is_executed(
    vissl_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("code", {"a": Danger()}), ("empty", {"lr": 0.1})):
        torch.save(content, tmp_path / name)
    (tmp_path / "text").write_bytes(pickle.dumps("text", protocol=2))
    out = tmp_path / "out.pt"
    for name, code in (
        ("code", "file.unreadable"),
        ("none", "file.unreadable"),
        ("empty", "weights.no_fit"),
        ("text", "file.unreadable"),
    ):
        with raises(ConfigError, code=code):
            convert_weights(tmp_path / name, out)
    assert "executed" not in capsys.readouterr().out
    assert not out.exists()
    out.touch()
    with raises(ConfigError, code="file.exists"):
        convert_weights(vissl_file, out)
