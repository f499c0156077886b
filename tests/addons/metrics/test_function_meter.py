"""A function of outputs and targets is a metric of the whole phase."""

from pathlib import Path
from typing import Any

import pytest
import torch
from linear_fits import fit_linear
from raising import raises
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phasetrain
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS
from phasetrain.testing import assert_exact_resume

INPUTS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
CALLS: list[tuple[tuple[int, ...], torch.dtype]] = []


def count_pairs(output: Tensor, target: Tensor, scale: float = 1.0) -> float:
    """Depends on all samples at once."""
    CALLS.append((tuple(output.shape), target.dtype))
    score = output[:, 1] - output[:, 0]
    return float((score[target == 1][:, None] > score[target == 0]).float().mean()) * scale


def two(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"largest": output.max(), "targets": target.sum()}


def fit(folder: Path, metrics: Any) -> phasetrain.RunResult:
    data = {"test": DATA, "DATA.TEST.batch_size": 8}
    return fit_linear(folder, DATA, nn.CrossEntropyLoss(), outputs=2, metrics=metrics, **data)


@pytest.mark.feature(
    "meters.function",
    "a function of all outputs and targets of a phase is a metric",
    "`METERS.*.name=my_parts.auc`",
)
def test_function_gets_all_samples_of_a_phase(tmp_path: Path) -> None:
    CALLS.clear()
    result = fit(tmp_path, [count_pairs])
    assert ((30, 2), torch.int64) in CALLS
    scores = result.load(model=nn.Linear(4, 2)).model(INPUTS)
    assert result.last["test/count_pairs"] == pytest.approx(count_pairs(scores, DATA.tensors[1]))


def test_values_by_name(tmp_path: Path) -> None:
    result = fit(tmp_path, {"of": two})
    assert result.last["test/of_targets"] == float(DATA.tensors[1].sum())


def test_function_without_a_name_has_a_label(tmp_path: Path) -> None:
    result = fit(tmp_path, [lambda output, target: 0.5])
    assert result.last["test/lambda"] == 0.5


def make(**params: Any) -> Any:
    return METERS.build(f"{__name__}.count_pairs", params, where="METERS.pairs")


def test_parameters_and_direction_are_keys() -> None:
    meter = make(scale=2.0, better="larger")
    scores = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
    mask = torch.tensor([True, True, False])
    step = StepOutput(torch.tensor(0.0), 2, 3, scores, torch.tensor([0, 1, 1]), mask)
    meter.update(step)
    assert meter.compute() == 2.0
    assert meter.direction() == "larger"
    copied = make()
    copied.load_rank_state(meter.rank_state())
    assert copied.targets.tolist() == [0, 1]
    assert copied.targets.dtype == torch.int64
    with raises(ConfigError, key="METERS.pairs.scal", suggestion="scale"):
        make(scal=1.0)


def weighted_error(output: Tensor, target: dict[str, Tensor]) -> float:
    """Needs two entries of the target."""
    return float(((output - target["value"]).abs() * target["weight"]).sum())


def test_function_gets_mappings_with_all_samples() -> None:
    meter, copied = (
        METERS.build(f"{__name__}.weighted_error", {}, where="METERS.error") for _ in range(2)
    )
    for output, value in ((1.0, 3.0), (5.0, 4.0)):
        target = {"value": torch.tensor([value, 9.0]), "weight": torch.tensor([2, 1])}
        mask = torch.tensor([True, False])
        rows = torch.tensor([output, 0.0])
        meter.update(StepOutput(torch.tensor(0.0), 1, 1, rows, target, mask))
    assert meter.compute() == 6.0  # 2 * |1 - 3| + 2 * |5 - 4|
    copied.load_rank_state(meter.rank_state())
    assert copied.compute() == 6.0
    assert copied.get_buffer("targets/weight").dtype == torch.int64
    meter.reset()
    assert meter.compute() == 0.0


@pytest.mark.parametrize("output", [[torch.zeros(1, 2)], {"a": {"b": torch.zeros(1)}}])
def test_output_without_tensors_is_rejected(output: Any) -> None:
    step = StepOutput(torch.tensor(0.0), 1, 1, output, torch.tensor([0]), None)
    with pytest.raises(ValueError, match=r"outputs.* are (list|dict).*key `output`"):
        make().update(step)


def test_resume_in_a_test_is_exact() -> None:
    words = ["experiment=digits", f"METERS.pairs.name={__name__}.count_pairs"]
    assert_exact_resume(words, workers=None)
