import pytest
import torch
from raising import raises
from torch import Tensor, nn

from phasetrain.errors import ConfigError
from phasetrain.losses import (
    CrossEntropy,
    FunctionLoss,
    WeightedSum,
    find_ignore_index,
    find_target_counter,
    has_nested_target_counter,
)
from phasetrain.testing.build import build_run

WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0]))


@pytest.mark.feature("loss.dice")
@pytest.mark.parametrize(
    ("loss", "target", "count"),
    [
        (nn.CrossEntropyLoss(ignore_index=1), torch.tensor([0, 1, 2, 1]), 2.0),
        (CrossEntropy(ignore_index=-100), torch.tensor([[0, 1], [-100, 0]]), 3.0),
        (WEIGHTED, torch.tensor([0, 1, 1]), 4.5),
        (nn.NLLLoss(ignore_index=0), torch.tensor([[0, 1], [2, 0]]), 2.0),
        (WEIGHTED, torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), 2.0),
    ],
)
def test_counter_returns_the_denominator_of_torch(
    loss: nn.Module, target: Tensor, count: float
) -> None:
    found = find_target_counter(loss)
    assert found is not None
    assert found(target) == count


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1)]
)
def test_losses_over_samples_have_no_counter(loss: nn.Module) -> None:
    assert find_target_counter(loss) is None
    assert not has_nested_target_counter(loss)


def test_nested_counter_is_rejected_with_accumulation() -> None:
    words = ["LOSS={name: weighted_sum, losses: {a: {name: CrossEntropyLoss, ignore_index: 3}}}"]
    build_run(words)
    with raises(ConfigError, key="LOSS.name", given="'weighted_sum'"):
        build_run([*words, "OPTIMIZER.accumulate=4"])


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reduction_other_than_mean_is_rejected(reduction: str) -> None:
    with raises(ConfigError, key="LOSS.reduction", given=f"'{reduction}'"):
        build_run(["LOSS.name=CrossEntropyLoss", f"LOSS.reduction={reduction}"])


def sum_losses(*entries: tuple[nn.Module, str | None]) -> WeightedSum:
    losses = {
        f"{number}": {"name": f"{number}", "target": key} for number, (_, key) in enumerate(entries)
    }
    return WeightedSum(losses, lambda section, where: entries[int(section["name"])][0])


SUM = sum_losses(
    (CrossEntropy(ignore_index=1), "a"), (nn.NLLLoss(ignore_index=2), "b"), (nn.MSELoss(), "c")
)


@pytest.mark.parametrize(
    ("losses", "target", "ignored"),
    [
        ([CrossEntropy()], None, -100),
        ([CrossEntropy(ignore_index=0)], None, 0),
        ([nn.NLLLoss(ignore_index=255)], None, 255),
        ([nn.Sequential(nn.CrossEntropyLoss())], None, -100),
        ([FunctionLoss(nn.functional.cross_entropy, {})], None, -100),
        ([FunctionLoss(nn.functional.cross_entropy, {"ignore_index": 7})], None, 7),
        ([FunctionLoss(nn.functional.mse_loss, {})], None, None),
        ([nn.MSELoss()], None, None),
        ([SUM], "a", 1),
        ([SUM], "b", 2),
        ([SUM], "c", None),
        ([SUM], None, None),
        ([sum_losses((CrossEntropy(), "a"), (nn.MSELoss(), "c"))], None, -100),
        ([CrossEntropy(), CrossEntropy(ignore_index=1)], None, None),
        ([], None, None),
    ],
)
def test_ignored_class_is_that_of_the_loss_of_the_target(
    losses: list[nn.Module], target: str | None, ignored: int | None
) -> None:
    assert find_ignore_index(losses, target) == ignored
