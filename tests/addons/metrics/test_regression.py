import math
from functools import partial

import pytest
import torch
from measuring import seen as seen_in_steps
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from phasetrain.addons.metrics.regression import Regression
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS

GENERATOR = torch.Generator().manual_seed(11)
OUTPUT = torch.randn(100, 3, generator=GENERATOR, dtype=torch.float64)
TARGET = OUTPUT * torch.tensor([1.0, 0.5, 2.0]) + torch.randn(
    100, 3, generator=GENERATOR, dtype=torch.float64
)

seen = partial(seen_in_steps, steps=4)


def theirs(output, target, weights=None):
    how = {"multioutput": "uniform_average" if weights is None else weights}
    squared = mean_squared_error(target.numpy(), output.numpy(), **how)
    return {
        "mse": pytest.approx(squared, abs=1e-12),
        "rmse": pytest.approx(math.sqrt(squared), abs=1e-12),
        "mae": pytest.approx(mean_absolute_error(target.numpy(), output.numpy(), **how), abs=1e-12),
        "r2": pytest.approx(r2_score(target.numpy(), output.numpy(), **how), abs=1e-12),
    }


@pytest.mark.parametrize("steps", [1, 7])
def test_values_equal_scikit_learn(steps):
    assert seen(Regression(), OUTPUT, TARGET, steps=steps) == theirs(OUTPUT, TARGET)


def test_columns_are_weighted():
    found = seen(Regression([1.0, 0.0, 3.0]), OUTPUT, TARGET)
    assert found == theirs(OUTPUT, TARGET, [1.0, 0.0, 3.0])
    assert found != theirs(OUTPUT, TARGET)


@pytest.mark.parametrize(
    "shapes", [((-1,), (-1,)), ((-1, 1), (-1,)), ((-1,), (-1, 1)), ((-1, 1), (-1, 1))]
)
def test_one_number_per_sample_may_have_either_shape(shapes):
    output, target = OUTPUT[:, 0], TARGET[:, 0]
    assert seen(Regression(), output.view(shapes[0]), target.view(shapes[1])) == theirs(
        output, target
    )


def test_masked_samples_do_not_count():
    mask = torch.arange(100) % 3 > 0
    output = OUTPUT.clone()
    output[0] = math.nan
    assert seen(Regression(), output, TARGET, mask) == theirs(OUTPUT[mask], TARGET[mask])


def test_r2_of_targets_far_from_0():
    far = 1e9
    found = seen(Regression(), OUTPUT + far, TARGET + far)["r2"]
    assert found == pytest.approx(r2_score(TARGET.numpy(), OUTPUT.numpy()), abs=1e-6)
    squares = ((TARGET + far) ** 2).sum(0) - (TARGET + far).sum(
        0
    ) ** 2 / 100  # what sums of squares give instead
    naive = float((1 - (OUTPUT - TARGET).square().sum(0) / squares).mean())
    assert abs(naive - found) > 0.1


def test_constant_targets_have_no_r2():
    found = seen(Regression(), OUTPUT[:, 0], torch.ones(100))
    assert math.isnan(found["r2"])
    assert found["mse"] > 0


@pytest.mark.parametrize(
    ("output", "target", "message"),
    [
        (OUTPUT, TARGET[:, :2], r"\(100, 3\) .*\(100, 2\)"),
        (OUTPUT[:, :1], TARGET, r"\(100, 1\) .*\(100, 3\)"),
        (OUTPUT[:50], TARGET, r"\(50, 3\) .*\(100, 3\)"),
        (OUTPUT, None, "Tensor .*NoneType"),
    ],
)
def test_misfitting_inputs_are_rejected(output, target, message):
    with pytest.raises(ValueError, match=message):
        Regression().update(StepOutput(torch.tensor(0.0), 1.0, 1, output, target))


def test_invalid_weights_are_rejected():
    with pytest.raises(ValueError, match=r"2 weights .* 3 columns"):
        seen(Regression([1.0, 2.0]), OUTPUT, TARGET)
    for given in ([], [0.0], [1.0, -1.0]):
        with pytest.raises(ConfigError, match=r"METERS.m .*weights = \["):
            METERS.build("regression", {"weights": given}, where="METERS.m")
