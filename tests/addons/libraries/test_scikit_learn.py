"""The tables of scikit-learn, and their folds."""

import sys

import pytest
import torch
from raising import raises

from phasetrain.addons.libraries.scikit_learn import NumberSamples, load_sklearn
from phasetrain.data.datasets import TensorSamples
from phasetrain.errors import ConfigError


def test_classes_of_a_table() -> None:
    found = load_sklearn("wine", "all", standardize=False)
    assert isinstance(found, TensorSamples)
    assert found.inputs.shape == (178, 13)
    assert found.facts()["class_names"] == ("class_0", "class_1", "class_2")
    assert found.facts()["input_columns"][:3] == ("alcohol", "malic_acid", "ash")
    assert found.inputs[0, :3].tolist() == pytest.approx([14.23, 1.71, 2.43])
    assert torch.bincount(found.targets).tolist() == [59, 71, 48]


@pytest.mark.parametrize(("data", "columns", "features"), [("diabetes", 1, 10), ("linnerud", 3, 3)])
def test_regression(data: str, columns: int, features: int) -> None:
    found = load_sklearn(data, "train")  # type: ignore[arg-type]
    assert isinstance(found, NumberSamples)
    facts = dict(found.facts())
    assert len(facts.pop("input_columns")) == features
    assert facts == {"input_shape": (features,)}
    inputs, target = found[1]
    assert inputs.shape == (features,)
    assert target.shape == (columns,)


@pytest.mark.feature(
    "data.scikit_learn",
    "tables of scikit-learn with folds for cross-validation",
    "`DATA.*.dataset: sklearn`, recipe [tabular](recipes/tabular.md)",
)
@pytest.mark.parametrize("data", ["wine", "diabetes"])
def test_folds_are_a_partition(data: str) -> None:
    every = load_sklearn(data, "all")  # type: ignore[arg-type]
    sizes = []
    rows = []
    for fold in range(5):
        test = load_sklearn(data, "test", fold=fold, standardize=False)  # type: ignore[arg-type]
        train = load_sklearn(data, "train", fold=fold, standardize=False)  # type: ignore[arg-type]
        assert len(test) + len(train) == len(every)
        sizes.append(len(test))
        rows.append(test.inputs)
    assert max(sizes) - min(sizes) <= 1
    whole = load_sklearn(data, "all", standardize=False)  # type: ignore[arg-type]
    together = torch.cat(rows)
    assert torch.equal(together.sum(1).sort().values, whole.inputs.sum(1).sort().values)


def test_folds_have_equal_proportions_of_classes() -> None:
    for fold in range(5):
        targets = load_sklearn("wine", "test", fold=fold).targets
        assert all(
            abs(count - total / 5) < 1
            for count, total in zip(torch.bincount(targets).tolist(), (59, 71, 48), strict=True)
        )


@pytest.mark.feature("data.scikit_learn")
def test_training_rows_alone_are_standardized() -> None:
    train = load_sklearn("diabetes", "train")
    test = load_sklearn("diabetes", "test")
    for values in (train.inputs, train.targets):
        assert torch.allclose(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5)
        assert torch.allclose(values.std(0, correction=0), torch.ones(values.shape[1]))
    # With statistics of all rows, the means of both parts would have opposite signs.
    assert test.targets.mean().abs() > 1e-3


def test_constant_columns_stay_finite() -> None:
    assert load_sklearn("digits").inputs.isfinite().all()


def test_fold_is_the_same_everywhere() -> None:
    assert (
        load_sklearn("diabetes", "test").fingerprint()
        == load_sklearn("diabetes", "test").fingerprint()
    )
    first = load_sklearn("wine", "test", standardize=False).inputs[:4, 0]
    assert first.tolist() == pytest.approx([14.23, 14.06, 13.75, 14.75])


@pytest.mark.parametrize(
    "words",
    [{"data": "cars"}, {"data": "wine", "split": "val"}, {"data": "wine", "fold": 5}],
)
def test_wrong_parameters_are_rejected(words: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        load_sklearn(**words)  # type: ignore[arg-type]


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with raises(ConfigError, code="config.missing_library"):
        load_sklearn("wine")
