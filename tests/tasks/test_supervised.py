"""Misfits of input, output and target are said in words, with shapes and the sample."""

from typing import Any

import pytest
import torch
from torch import nn

from phasetrain.batch import Batch
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.machine import Machine
from phasetrain.tasks import Parts, Supervised


def task(model: nn.Module, loss: nn.Module) -> Supervised:
    return Supervised(Parts(model, loss, {}, None, {}, Machine(torch.device("cpu")), World(), 0))


def batch(target: Any, inputs: Any = None) -> Batch:
    inputs = torch.ones(4, 3) if inputs is None else inputs
    return Batch(inputs, target, torch.tensor([40, 41, 42, 43]), 4)


CLASSES = torch.tensor([0, 1, 1, 0])


def test_the_output_of_a_forward_pass() -> None:
    out = task(nn.Linear(3, 2), nn.CrossEntropyLoss()).forward(batch(CLASSES))
    assert out.output.shape == (4, 2)
    assert (out.weight, out.samples, out.loss.ndim) == (4, 4, 0)
    assert out.target is CLASSES


class TestMisfits:
    def test_a_killed_worker_is_no_misfit(self) -> None:
        class Interrupted(nn.Module):
            def forward(self, value: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

        with pytest.raises(RuntimeError, match="pid 7") as caught:
            task(Interrupted(), nn.CrossEntropyLoss()).forward(batch(CLASSES))
        assert not isinstance(caught.value, ConfigError)

    def message(self, model: nn.Module, loss: nn.Module, given: Batch) -> str:
        with pytest.raises(ConfigError) as caught:
            task(model, loss).forward(given)
        return str(caught.value)

    def test_an_input_that_the_model_does_not_take(self) -> None:
        found = self.message(nn.Linear(5, 2), nn.CrossEntropyLoss(), batch(CLASSES))
        assert found.startswith(
            "MODEL: Linear does not take the input (4, 3) float32 of samples 40, 41, 42, ...: mat1 and mat2 shapes"
        )

    def test_nested_inputs_are_shown(self) -> None:
        given = batch(CLASSES, {"a": torch.ones(4, 1), "b": [torch.ones(4), 3]})
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(), given)
        assert "the input {a: (4, 1) float32, b: [(4,) float32, int]} of samples" in found

    @pytest.mark.parametrize("label", [2, 9, -1])
    def test_a_label_outside_the_classes_is_named_with_its_sample(self, label: int) -> None:
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(), batch(torch.tensor([0, 1, label, 0])))
        assert found == (
            f"DATA.TRAIN: sample 42 has label {label}, and the model gives 2 classes, so labels go from 0 to 1; set "
            "MODEL.classes to the number of classes, or mend the labels"
        )

    def test_targets_of_the_wrong_type(self) -> None:
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(), batch(torch.ones(4)))
        assert found.startswith(
            "LOSS: CrossEntropyLoss does not fit the output (4, 2) float32 of the model Linear and the target (4,) "
        )

    @pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss()])
    @pytest.mark.filterwarnings("ignore:Using a target size")
    def test_shapes_that_would_be_paired_in_silence(self, loss: nn.Module) -> None:
        found = self.message(nn.Linear(3, 1), loss, batch(torch.ones(4)))
        assert found.startswith(f"LOSS: {type(loss).__name__} does not fit the output (4, 1) float32")
        assert found.endswith("the shapes differ, so every output would be paired with every target")
        task(nn.Linear(3, 1), loss).forward(batch(torch.ones(4, 1)))

    def test_a_loss_that_is_no_scalar(self) -> None:
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"), batch(CLASSES))
        assert found.endswith("the loss is (4,) float32, expected a scalar tensor, the mean over the batch")

    def test_no_target(self) -> None:
        found = self.message(nn.Linear(3, 2), nn.CrossEntropyLoss(), batch(None))
        assert "and the target NoneType" in found
