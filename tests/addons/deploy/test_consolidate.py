import runpy
import sys
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import load_file

from phasetrain.addons.deploy.consolidate import consolidate
from phasetrain.checkpoint import Checkpointer
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import Storage

TOOL = Path(__file__).parents[3] / "tools" / "consolidate.py"


def tool(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """Run the command line and return its exit code."""
    monkeypatch.setattr(sys, "argv", [str(TOOL), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    return ended.value.code


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint of a model with tied weights."""
    weight = torch.arange(6.0).view(2, 3)
    state = {
        "task": {
            "model": {"a": weight, "tied": weight, "n": torch.tensor(7)},
            "other": {"b": torch.ones(2)},
        }
    }
    root = tmp_path / "checkpoints"
    return root / Checkpointer(str(root), Storage()).save(RunState(), state, {}).name


def test_it_holds_the_weights_under_the_names_of_the_model(
    checkpoint: Path, tmp_path: Path
) -> None:
    assert consolidate(str(checkpoint), str(tmp_path / "out.safetensors")) == (
        2,
        (tmp_path / "out.safetensors").stat().st_size,
    )

    found = load_file(tmp_path / "out.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "n": 7,
    }


def test_it_can_hold_everything(checkpoint: Path, tmp_path: Path) -> None:
    consolidate(str(checkpoint), str(tmp_path / "out.safetensors"), everything=True)

    assert sorted(load_file(tmp_path / "out.safetensors")) == [
        "task.model.a",
        "task.model.n",
        "task.other.b",
    ]


def test_the_folder_of_the_file_is_made(checkpoint: Path, tmp_path: Path) -> None:
    consolidate(str(checkpoint), str(tmp_path / "new" / "all.safetensors"))
    assert (tmp_path / "new" / "all.safetensors").is_file()


def test_a_file_that_exists_is_not_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_text("mine")

    with raises(ConfigError, code="file.exists"):
        consolidate(str(checkpoint), str(tmp_path / "out.safetensors"))

    assert (tmp_path / "out.safetensors").read_text() == "mine"


def test_a_damaged_checkpoint_is_refused_and_nothing_is_made(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = bytearray((checkpoint / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "tensors.safetensors").write_bytes(content)

    assert tool(monkeypatch, str(checkpoint), str(tmp_path / "out.safetensors")) == 2

    assert str(checkpoint) in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("out*")] == []


def test_the_tool_says_what_it_has_made(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tool(monkeypatch, str(checkpoint), str(tmp_path / "out.safetensors"), "--all") == 0

    assert f"{tmp_path}/out.safetensors: 3 tensors, " in capsys.readouterr().out
