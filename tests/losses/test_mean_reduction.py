import pytest
import torch
from torch import Tensor, nn

from phasetrain.errors import ConfigError
from phasetrain.losses import count_of, counts_otherwise
from phasetrain.testing.build import built

WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0]))


@pytest.mark.parametrize(
    ("loss", "target", "count"),
    [
        (nn.CrossEntropyLoss(ignore_index=1), torch.tensor([0, 1, 2, 1]), 2.0),
        (WEIGHTED, torch.tensor([0, 1, 1]), 4.5),
        (nn.NLLLoss(ignore_index=0), torch.tensor([[0, 1], [2, 0]]), 2.0),
        (WEIGHTED, torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), 2.0),
    ],
)
def test_what_the_mean_is_divided_by(loss: nn.Module, target: Tensor, count: float) -> None:
    found = count_of(loss)
    assert found is not None
    assert found(target) == count


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1)]
)
def test_those_over_samples(loss: nn.Module) -> None:
    assert count_of(loss) is None
    assert not counts_otherwise(loss)


def test_one_inside_another_goes_with_whole_batches_alone() -> None:
    words = ["LOSS={name: weighted_sum, losses: {a: {name: CrossEntropyLoss, ignore_index: 3}}}"]
    built(words)
    with pytest.raises(ConfigError, match=r"a part of it leaves targets out or weighs classes"):
        built([*words, "OPTIMIZER.accumulate=4"])


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_sum_is_refused(reduction: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"LOSS\.reduction = '{reduction}': an update weighs means over samples"
    ):
        built(["LOSS.name=CrossEntropyLoss", f"LOSS.reduction={reduction}"])
