"""The small tables that scikit-learn ships, with folds for cross-validation."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.config.checks import check_at_least
from phasetrain.data.datasets.base import DATASETS, TensorSamples
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.proof.digest import hash_tensors

if TYPE_CHECKING:
    from sklearn.utils import Bunch

SETS = ("breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine")
REGRESSION = ("diabetes", "linnerud")

SPLITS = ("train", "test", "all")

Array = NDArray[np.float64]


class NumberSamples(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers with numbers as targets, in memory; it draws no random numbers.

    Args:
        inputs: `(N, D)`.
        targets: `(N, columns)`.
        input_columns: name of each column of the inputs.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, input_columns: Sequence[str] = ()) -> None:
        self.inputs = inputs
        self.targets = targets
        self.input_columns = tuple(input_columns)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def facts(self) -> Mapping[str, Any]:
        """Return `input_shape`, and `input_columns` if there are any."""
        shape = {"input_shape": tuple(self.inputs.shape[1:])}
        if self.input_columns:
            return {**shape, "input_columns": self.input_columns}
        return shape

    def fingerprint(self) -> str:
        """Return the SHA-256 over type, shape and bytes of inputs and targets."""
        return hash_tensors(self.inputs, self.targets)


@DATASETS.register("sklearn")
def load_sklearn(
    data: Literal["breast_cancer", "diabetes", "digits", "iris", "linnerud", "wine"],
    split: Literal["train", "test", "all"] = "train",
    folds: int = 5,
    fold: int = 0,
    seed: int = 0,
    *,
    standardize: bool = True,
) -> TensorSamples | NumberSamples:
    """Load a table that scikit-learn ships; nothing is downloaded.

    Inputs are float32 `(D,)`. Targets are int64 classes, or float32 `(columns,)` for `diabetes`
    (1 column) and `linnerud` (3 columns), for which a model needs `MODEL.classes: 1` or 3.

    Args:
        data: name of the table.
        split: `train`, all folds but one; `test`, this fold; or `all`.
        folds: number of folds. Folds of tables with classes have equal proportions of them.
        fold: the fold to test on, from 0.
        seed: seed of the folds, independent of RUN.seed.
        standardize: give every column, and the targets of a regression, mean 0 and standard
            deviation 1 over the training rows.

    Raises:
        ConfigError: scikit-learn is not installed.
        ValueError: an unknown name, or a fold that does not exist.
    """
    if data not in SETS:
        raise ValueError(
            f"data = {data!r}: expected one of {', '.join(SETS)}{did_you_mean(data, SETS)}"
        )
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: expected one of {', '.join(SPLITS)}")
    check_at_least(2, folds=folds)
    if not 0 <= fold < folds:
        raise ValueError(f"fold = {fold}: expected 0 to {folds - 1}")
    table = _load_table(data)
    is_test = _choose_fold(table, folds, fold, seed, by_class=data not in REGRESSION)
    train = ~is_test
    if split == "all":
        train = chosen = np.ones_like(is_test)
    else:
        chosen = is_test == (split == "test")
    inputs = table.data.astype(np.float64)
    targets = table.target
    if standardize:
        inputs = _standardize(inputs, train)
    rows = torch.from_numpy(inputs[chosen].astype(np.float32))
    names = [str(name) for name in table.feature_names]
    if data not in REGRESSION:
        return TensorSamples(
            rows,
            torch.from_numpy(targets[chosen].astype(np.int64)),
            classes=len(table.target_names),
            class_names=[str(name) for name in table.target_names],
            input_columns=names,
        )
    columns = targets.reshape(len(targets), -1).astype(np.float64)
    if standardize:
        columns = _standardize(columns, train)
    return NumberSamples(rows, torch.from_numpy(columns[chosen].astype(np.float32)), names)


def _load_table(data: str) -> "Bunch":
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the dataset 'sklearn' needs scikit-learn, which is not installed; "
            'run: pip install "phasetrain[sklearn]"',
            code="config.missing_library",
        ) from error
    load = {name: vars(datasets)[f"load_{name}"] for name in SETS}[data]
    return load()


def _choose_fold(
    table: "Bunch", folds: int, fold: int, seed: int, *, by_class: bool
) -> NDArray[np.bool_]:
    """Return which rows belong to a fold, `(N,)`."""
    # Own code, so that the folds are the same with every version of scikit-learn.
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(table.data))
    if by_class:
        # Stable: rows of a class stay in their random order, and are dealt out in turn.
        order = order[np.argsort(table.target[order], kind="stable")]
    is_test = np.zeros(len(order), dtype=bool)
    is_test[order[fold::folds]] = True
    return is_test


def _standardize(columns: Array, train: NDArray[np.bool_]) -> Array:
    mean = columns[train].mean(axis=0)
    deviation = columns[train].std(axis=0)
    # A constant column, such as a border pixel of the digits, stays constant.
    scaled: Array = (columns - mean) / np.where(deviation > 0, deviation, 1.0)
    return scaled
