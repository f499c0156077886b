"""Activations and operations of a model, counted by hand, and weights that the loss does not use."""

import pytest
from harness import SMALL
from torch import Tensor, nn

from phasetrain.addons.observe.profiling.inspection import inspect
from phasetrain.tasks.inspection import ModuleRow
from phasetrain.testing.build import build_run

WIDTH = 4


class Spared(nn.Module):
    """A linear model with a layer that its output does not depend on."""

    def __init__(self, *, spare: bool) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.spare = nn.Linear(64, 10) if spare else None

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(images.flatten(1))
        return logits


@pytest.mark.feature("11")
def test_table_of_a_small_network_equals_hand_counted_values() -> None:
    one = build_run([*SMALL, f"MODEL.width={WIDTH}"])
    batch = next(iter(one.task.batches(one.plan.phases[0], 0)))[0]
    found = inspect(one.task, one.plan.phases[0], batch)
    rows = {row.name: row for row in found.modules}
    assert rows["features.0"] == ModuleRow(
        "features.0", "Conv2d", 36, 36, "(N, 4, 8, 8)", 24 * 256 * 4, 2 * 36 * 64
    )
    assert rows["head"] == ModuleRow("head", "Linear", 90, 90, "(N, 10)", 24 * 40, 2 * 80)
    assert found.forward_flops == rows[""].flops == 2 * (36 * 64 + 288 * 16 + 576 * 4 + 80)
    # A backward pass takes as much for the weights and as much for the inputs, which the first
    # layer's has not.
    assert found.train_flops == 3 * 18592 - 2 * 36 * 64
    leaves = (
        3 * (4 * 64) + 3 * (8 * 16) + 3 * (8 * 4) + 8 + 10
    )  # values per sample: three blocks, dropout, head
    assert found.activation_bytes == 24 * 4 * (leaves + 64)
    assert all(parameter.grad is None for parameter in one.task.model.parameters())


@pytest.mark.parametrize(("spare", "lines"), [(True, 1), (False, 0)])
def test_parameters_that_the_loss_does_not_use_are_named(
    spare: bool, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    words = (
        f"MODEL={{name: {__name__}.Spared, spare: {spare}}}",
        "METERS.loss=null",
    )
    built = build_run([*SMALL[:5], *words])
    batch = next(iter(built.task.batches(built.plan.phases[0], 0)))[0]
    with caplog.at_level("INFO"):
        inspect(built.task, built.plan.phases[0], batch)
    hints = [one.getMessage() for one in caplog.records if "find_unused" in one.getMessage()]
    assert len(hints) == lines
    assert all("spare.weight, spare.bias" in hint for hint in hints)
