"""Tensors are read from a checkpoint straight into those of a run, and verified on the way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.distributed.strategies.state import StateAdapter, Target
from phasetrain.engine.position import RunState
from phasetrain.errors import InvalidCheckpointError
from phasetrain.runtime.storage import Storage

STATE: dict[str, Any] = {
    "task": {
        "model": {
            "weight": torch.arange(6.0).view(2, 3),
            "image": torch.arange(16.0).view(1, 4, 2, 2),
            "count": torch.tensor(7),
            "empty": torch.zeros(0, 3),
            "half": torch.tensor([0.5], dtype=torch.bfloat16),
        },
        "updater": {"step": 3},
    }
}


def save_and_load(root: Path) -> LoadedCheckpoint:
    made = Checkpointer(str(root), Storage())
    made.save(RunState(), STATE, {"config": {}})
    made.reads_in_place = True
    loaded = made.load_newest()
    assert loaded is not None
    return loaded


def test_without_targets_every_tensor_gets_its_own_memory(tmp_path: Path) -> None:
    state = save_and_load(tmp_path).state
    model = state["task"]["model"]
    assert state["task"]["updater"] == {"step": 3}
    for name, tensor in STATE["task"]["model"].items():
        assert model[name].dtype == tensor.dtype
        assert torch.equal(model[name], tensor)
        assert model[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.feature("checkpoint.memory")
def test_targets_are_filled_in_place_and_others_left_out(tmp_path: Path) -> None:
    weight = torch.zeros(2, 3)
    image = torch.zeros(1, 4, 2, 2).to(memory_format=torch.channels_last)

    def find_targets(state: dict[str, Any]) -> list[Target]:
        model = state["task"]["model"]
        assert all(tensor.is_meta for tensor in model.values())
        return [(model["weight"], weight), (model["image"], image), (model["half"], None)]

    model = save_and_load(tmp_path).read_state(find_targets)["task"]["model"]
    assert model["weight"] is weight
    assert model["image"] is image
    assert torch.equal(weight, STATE["task"]["model"]["weight"])
    assert torch.equal(image, STATE["task"]["model"]["image"])
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert model["half"].is_meta
    assert model["count"].item() == 7


def test_damage_after_the_verification_is_noticed_when_the_tensors_are_read(tmp_path: Path) -> None:
    loaded = save_and_load(tmp_path)
    file = tmp_path / "p0000-s00000000" / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidCheckpointError, match="digest"):
        loaded.read_state(None)
    file.write_bytes(content[:-1])
    with pytest.raises(InvalidCheckpointError, match="shorter"):
        loaded.read_state(None)


class Own(nn.Linear):
    """A module that looks at its weight while it loads another."""

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        self.moved = (state[f"{prefix}weight"] - self.weight).abs().sum().item()
        super()._load_from_state_dict(state, prefix, *others)


def test_modules_that_load_by_themselves_get_new_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Own(2, 2))
    state = {name: torch.empty_like(one, device="meta") for name, one in model.state_dict().items()}
    names = {id(one): name for name, one in state.items()}
    found = {
        names[id(saved)]: target for saved, target in StateAdapter().model_targets(model, state)
    }
    assert found.keys() == {"0.weight", "0.bias"}
    assert found["0.weight"] is model[0].weight
    state["0.weight"] = torch.empty(2, 2, dtype=torch.float64, device="meta")
    assert len(StateAdapter().model_targets(model, state)) == 1
