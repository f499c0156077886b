"""Judge extracted features with linear support vector machines (`phasetrain probe --kind svm`).

scikit-learn's, because its solver gave the published numbers of this benchmark.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.addons.deploy.extract.feature_files import read_columns
from phasetrain.addons.deploy.extract.linear_probe import check_origins
from phasetrain.config.addons import require_service
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import seed_of
from phasetrain.runtime.storage import open_storage

COSTS = (0.01, 0.1, 1.0, 10.0)
Array = NDArray[Any]


@dataclass(frozen=True)
class SvmSettings:
    """Settings of a probe.

    Attributes:
        layer: name of the layer, or of another column such as `scores`.
        costs: candidates for the cost C of a sample on the wrong side.
        folds: folds of the cross-validation that chooses the cost of each class.
        shots: numbers k: instead of all samples, each class gets k with it, and k without it per
            other class. Without a cross-validation, the cost is the best one in the test.
        draws: how often such samples are drawn.
        seed: selects them, and the order in which the solver takes samples.
    """

    layer: str
    costs: Sequence[float] = COSTS
    folds: int = 3
    shots: Sequence[int] = ()
    draws: int = 5
    seed: int = 0


@dataclass(frozen=True)
class SvmProbed:
    """The result of a probe; average precisions are areas as in PASCAL VOC, in [0, 1].

    Attributes:
        layer: name of the layer.
        samples: number of training and test samples.
        dimensions: numbers per sample.
        mean: mean average precision over classes; None with `shots`.
        average_precision: one for each class; None if no test sample has it.
        costs: the chosen cost of each class.
        shots: k -> `cost` and the `mean`, `min` and `max` of the mean average precision over draws.
    """

    layer: str
    samples: tuple[int, int]
    dimensions: int
    mean: float | None = None
    average_precision: list[float | None] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    shots: dict[int, dict[str, float]] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table."""
        if not self.shots:
            return [(f"SVM, {len(self.costs)} classes", f"{self.mean:.4f}")]
        return [
            (f"SVM, {k} per class (C = {scores['cost']:g})", f"{scores['mean']:.4f}")
            for k, scores in self.shots.items()
        ]


def probe_by_svm(train: str, test: str, settings: SvmSettings, out: str | None = None) -> SvmProbed:
    """Judge the features of one split by the features of another, and write the result.

    For each class, an SVM separates the samples with it from all others (Goyal et al. 2019,
    arXiv:1905.01235). Features are normalised. Targets are classes, or a table of 1 (present), 0
    (absent) and -1 (unknown): not measured in a test, and absent in training with all samples.

    Args:
        train, test: folders from `phasetrain extract`, one for each split.
        settings: of the probe.
        out: file to write; None for `probe.json` next to the folder `test`.

    Raises:
        ConfigError: scikit-learn or the add-on `metrics` is not installed, a folder is not complete
            or has no such layer, there are no targets, a class has too few samples, or a setting is
            invalid.
    """
    _check_settings(settings)
    _require_area()  # before minutes of fitting
    features, targets = _read_features(train, settings.layer)
    others, expected = _read_features(test, settings.layer)
    check_origins(train, test, features.shape[1], others.shape[1])
    classes = max(_count_classes(targets), _count_classes(expected))
    table = _tabulate(targets, classes)
    expected = _tabulate(expected, classes)
    measured: dict[str, Any] = {}
    if settings.shots:
        measured["shots"] = {
            k: _classify_few(features, targets, others, expected, k, settings)
            for k in settings.shots
        }
    else:
        chosen = [choose_cost(features, table[:, label] > 0, settings) for label in range(classes)]
        precisions = [
            _measure(
                _fit(features, table[:, label] > 0, cost, settings), others, expected[:, label]
            )
            for label, cost in enumerate(chosen)
        ]
        measured = {"costs": chosen, "mean": float(np.nanmean(precisions))}
        measured["average_precision"] = [
            None if math.isnan(precision) else precision for precision in precisions
        ]
    result = SvmProbed(settings.layer, (len(features), len(others)), features.shape[1], **measured)
    path = out or f"{test.rstrip('/').rpartition('/')[0] or '.'}/probe.json"
    content = {"train": train, "test": test, "settings": asdict(settings), **asdict(result)}
    open_storage(path).replace_json(path, content)
    return result


def _classify_few(
    features: Array,
    targets: Array,
    others: Array,
    expected: Array,
    shots: int,
    settings: SvmSettings,
) -> dict[str, float]:
    """Return the best cost for a number of samples per class, and its mean average precisions."""
    means = np.empty((settings.draws, len(settings.costs)))
    for draw in range(settings.draws):
        # A draw depends on its number and on k alone, not on the other values of `shots`.
        random = np.random.default_rng(seed_of(settings.seed, "shots", shots, draw))
        table = draw_shots(targets, expected.shape[1], shots, random)
        for cost_index, cost in enumerate(settings.costs):
            precisions = []
            for label, presence in enumerate(table.T):
                is_known = presence >= 0
                classifier = _fit(features[is_known], presence[is_known] > 0, cost, settings)
                precisions.append(_measure(classifier, others, expected[:, label]))
            means[draw, cost_index] = np.nanmean(precisions)
    best = int(means.mean(axis=0).argmax())
    values = means[:, best]
    return {
        "cost": float(settings.costs[best]),
        "mean": float(values.mean()),
        "min": float(values.min()),
        "max": float(values.max()),
    }


def draw_shots(targets: Array, classes: int, shots: int, random: np.random.Generator) -> Array:
    """Return a table `(N, classes)` of 1, 0 and -1 in which few samples are known.

    Args:
        targets: classes `(N,)`, where each class gets `shots` samples, or a table, where each
            column gets `shots` ones and `shots * (classes - 1)` zeros.
        classes: number of classes.
        shots: samples per class.
        random: generator that chooses the samples.

    Raises:
        ConfigError: a class has too few samples.
    """
    table = _tabulate(targets, classes)
    shots_table = np.full_like(table, -1)
    for label in range(classes):
        wanted = {1: shots}
        if targets.ndim == 2:
            wanted[0] = shots * (classes - 1)
        for value, count in wanted.items():
            rows = np.flatnonzero(table[:, label] == value)
            if len(rows) < count:
                raise ConfigError(
                    f"shots = {shots}: class {label} has only {len(rows)} samples of {count} that "
                    "are needed; leave this number out",
                    code="probe.too_few_samples",
                )
            drawn = random.choice(rows, count, replace=False)
            if targets.ndim == 2:
                shots_table[drawn, label] = value
            else:
                shots_table[drawn] = table[drawn]
    return shots_table


def choose_cost(features: Array, positive: Array, settings: SvmSettings) -> float:
    """Return the cost with the highest average precision in a cross-validation.

    Raises:
        ConfigError: there are fewer positive samples than folds.
    """
    from sklearn.model_selection import cross_val_score

    if positive.sum() < settings.folds:
        raise ConfigError(
            f"folds = {settings.folds}: a class has only {positive.sum()} training samples; set "
            "fewer folds",
            code="probe.too_few_samples",
        )
    if len(settings.costs) == 1:
        return settings.costs[0]
    scores = []
    for cost in settings.costs:
        with _without_warnings():
            precisions = cross_val_score(
                _make_svm(cost, settings),
                features,
                positive,
                cv=settings.folds,
                scoring="average_precision",
            )
        scores.append(precisions.mean())
    return settings.costs[int(np.argmax(scores))]


def _make_svm(cost: float, settings: SvmSettings) -> Any:
    try:
        from sklearn.svm import LinearSVC
    except ImportError as error:
        raise ConfigError(
            "probe --kind svm uses scikit-learn, which is not installed; "
            'run: pip install "phasetrain[svm]"',
            code="config.missing_library",
        ) from error
    # The weights and the limit of iterations are VISSL's.
    return LinearSVC(
        C=cost, class_weight={True: 2, False: 1}, max_iter=2000, random_state=settings.seed
    )


def _fit(features: Array, positive: Array, cost: float, settings: SvmSettings) -> Any:
    with _without_warnings():
        return _make_svm(cost, settings).fit(features, positive)


def _without_warnings() -> AbstractContextManager[Any]:
    # High costs often do not converge. The cross-validation measures what came of that.
    return warnings.catch_warnings(action="ignore")


def _measure(classifier: Any, features: Array, expected: Array) -> float:
    """Return the average precision over samples whose class is known."""
    is_known = expected >= 0
    scores = torch.from_numpy(classifier.decision_function(features[is_known]))
    return _require_area()(scores, torch.from_numpy(expected[is_known] > 0))


def _require_area() -> Callable[[Tensor, Tensor], float]:
    """Return the function that computes an average precision of scores and positives `(N,)`."""
    area: Callable[[Tensor, Tensor], float] = require_service(
        "compute_average_precision", "metrics", "probe --kind svm"
    )
    return area


def _read_features(path: str, layer: str) -> tuple[Array, Array]:
    """Return normalised features `(N, D)`, and classes `(N,)` or a table of them `(N, C)`."""
    columns = read_columns(path, [layer, "target"])
    features = columns[layer].flatten(1).double().numpy()
    # The constant is VISSL's.
    features /= np.linalg.norm(features, axis=1, keepdims=True) + 1e-5
    targets = columns["target"].numpy()
    if targets.ndim > 2 or (targets.ndim == 1 and targets.dtype.kind == "f"):
        raise ConfigError(
            f"{path!r}: the targets are {targets.dtype} of shape {targets.shape}, expected a class "
            "or a row of 1, 0 and -1 per sample",
            code="probe.no_classes",
        )
    if targets.ndim == 2:
        return features, targets.astype(np.int64)
    # A negative class means that it is unknown.
    is_known = targets >= 0
    return features[is_known], targets[is_known]


def _count_classes(targets: Array) -> int:
    if targets.ndim == 2:
        return int(targets.shape[1])
    return int(targets.max(initial=0)) + 1


def _tabulate(targets: Array, classes: int) -> Array:
    """Return a table `(N, classes)` of 1, 0 and -1."""
    if targets.ndim == 2:
        return targets
    return np.equal(targets[:, None], np.arange(classes)).astype(np.int64)


def _check_settings(settings: SvmSettings) -> None:
    if not settings.costs or min(settings.costs) <= 0:
        raise ConfigError(f"costs = {list(settings.costs)}: expected numbers above 0")
    if settings.folds < 2:
        raise ConfigError(f"folds = {settings.folds}: expected at least 2")
    if min(settings.shots, default=1) < 1 or settings.draws < 1:
        raise ConfigError(
            f"shots = {list(settings.shots)}, draws = {settings.draws}: expected numbers of at "
            "least 1"
        )
