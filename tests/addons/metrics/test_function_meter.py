"""A function of outputs and targets is a metric of the whole phase."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from linear_fits import fit_linear
from raising import raises
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

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


class WithLoss(nn.Module):
    """Returns its loss and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        scores = self.linear(inputs)
        return {"loss": nn.functional.cross_entropy(scores, target), "scores": scores}


def test_scalar_losses_in_the_output_are_left_out(tmp_path: Path) -> None:
    def count_keys(output: dict[str, Tensor], target: Tensor) -> dict[str, float]:
        return {f"{key}_rows": len(rows) for key, rows in output.items()}

    result = phasetrain.fit(
        WithLoss(),
        train=DATA,
        test=DATA,
        loss="from_model",
        metrics={"of": count_keys},
        LOSS={"with_target": True},
        epochs=1,
        batch_size=10,
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        RUN={"dir": str(tmp_path)},
    )
    kept = {name: value for name, value in result.last.items() if name.startswith("test/of")}
    assert kept == {"test/of_scores_rows": 30.0}


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


def measure_exits(output: list[Tensor], target: Tensor) -> dict[str, float]:
    """Needs all entries of a list."""
    return {f"exit{n}": float((rows - target).abs().sum()) for n, rows in enumerate(output)}


def test_function_gets_lists_with_all_samples() -> None:
    meter, copied = (
        METERS.build(f"{__name__}.measure_exits", {}, where="METERS.exits") for _ in range(2)
    )
    for target in (1.0, 2.0):
        rows = [torch.tensor([3.0]), torch.tensor([5.0])]
        meter.update(StepOutput(torch.tensor(0.0), 1, 1, rows, torch.tensor([target]), None))
    assert meter.compute() == {"exit0": 3.0, "exit1": 7.0}
    copied.load_state_dict(meter.state_dict())
    assert copied.compute() == {"exit0": 3.0, "exit1": 7.0}


@pytest.mark.parametrize("output", [["a"], [[torch.zeros(1)]], {"a": {"b": torch.zeros(1)}}])
def test_output_without_tensors_is_rejected(output: Any) -> None:
    step = StepOutput(torch.tensor(0.0), 1, 1, output, torch.tensor([0]), None)
    with pytest.raises(ValueError, match=r"outputs.* are (list|dict|str).*key `output`"):
        make().update(step)


class Weighted(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Samples whose target is a mapping."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        return INPUTS[index], {"value": INPUTS[index, 0], "weight": DATA.tensors[1][index]}


class Named(nn.Linear):
    """A model whose output is a mapping."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Any:
        mean = super().forward(inputs)[:, 0]
        return {"mean": mean, "double": 2 * mean, "a": mean + 1}


def named_loss(output: Mapping[str, Tensor], target: Any) -> Tensor:
    value = target["value"] if isinstance(target, Mapping) else target
    loss: Tensor = ((output["mean"] - value) ** 2).mean()
    return loss


def named_error(output: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> float:
    first, *_ = output.values()
    return weighted_error(first, dict(target))


def count_random_pairs(output: Tensor, target: Tensor) -> float:
    """Draws from all three generators, as a bootstrap does."""
    drawn = torch.rand(()) + random.random() + np.random.random_sample()
    return float((output.argmax(1) == target).sum()) + float(drawn)


def make_data() -> TensorDataset:
    return DATA


CONFIG = f"""
DATA:
  TRAIN: {{dataset: {__name__}.DATASET, batch_size: 5}}
  TEST: {{dataset: {__name__}.DATASET, batch_size: 10}}
MODEL: {{name: MODEL_NAME}}
LOSS: {{name: LOSS_NAME}}
METERS: {{error: {{name: {__name__}.FUNCTION, splits: [TEST]}}}}
OPTIMIZER: {{name: sgd, lr: 0.1}}
PHASES: {{epochs: 2}}
"""


@pytest.mark.parametrize(
    "parts",
    [
        {
            "DATASET": "make_data",
            "MODEL_NAME": "torch.nn.Linear, in_features: 4, out_features: 2",
            "LOSS_NAME": "cross_entropy",
            "FUNCTION": "count_pairs",
        },
        {
            "DATASET": "make_data",
            "MODEL_NAME": "torch.nn.Linear, in_features: 4, out_features: 2",
            "LOSS_NAME": "cross_entropy",
            "FUNCTION": "count_random_pairs",
        },
        {
            "DATASET": "Weighted",
            "MODEL_NAME": f"{__name__}.Named",
            "LOSS_NAME": f"{__name__}.named_loss",
            "FUNCTION": "named_error",
        },
    ],
    ids=["tensors", "random numbers", "mappings"],
)
def test_resume_in_a_test_is_exact(tmp_path: Path, parts: dict[str, str]) -> None:
    content = CONFIG
    for name, part in parts.items():
        content = content.replace(name, part)
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert_exact_resume([str(path)], steps=[4, 5], workers=None)  # within the test, and at its end


def test_restored_mappings_keep_the_order_of_their_keys() -> None:
    meter, fresh = (
        METERS.build(f"{__name__}.named_error", {}, where="METERS.error") for _ in range(2)
    )
    rows = {name: torch.tensor([1.0]) for name in "hbgcfdea"}
    meter.update(StepOutput(torch.tensor(0.0), 1, 1, rows, rows, None))
    fresh.load_state_dict(meter.state_dict())
    expected = ["outputs", "targets", *(f"outputs/{name}" for name in "hbgcfdea")]
    assert list(fresh.state_dict())[:10] == expected


def test_state_of_mappings_replaces_any_other() -> None:
    meter, fresh = (
        METERS.build(f"{__name__}.named_error", {}, where="METERS.error") for _ in range(2)
    )
    empty = dict(fresh.state_dict())
    target = {"value": torch.tensor([3.0]), "weight": torch.tensor([2])}
    output = {"mean": torch.tensor([1.0])}
    meter.update(StepOutput(torch.tensor(0.0), 1, 1, output, target, None))
    fresh.load_state_dict(meter.state_dict())
    assert fresh.compute() == 4.0
    assert fresh.get_buffer("targets/weight").dtype == torch.int64
    fresh.load_state_dict(empty)
    assert list(fresh.state_dict()) == ["outputs", "targets"]
