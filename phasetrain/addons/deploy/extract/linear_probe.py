"""Judge extracted features with nearest neighbours and a linear classifier (`phasetrain probe`).

Own code instead of scikit-learn, because it runs on the GPU and in chunks: the features of ImageNet
as float64 do not fit into the memory of most machines.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phasetrain.addons.deploy.extract.feature_files import read_columns, read_index
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import resolve_device, seed_of
from phasetrain.runtime.storage import open_storage

CHUNK = 4096
"""Rows per chunk."""

STEPS = 300
"""Maximum number of LBFGS steps for one classifier."""

NEIGHBOURS = (1, 5, 20)
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a probe.

    Attributes:
        layer: name of the layer, or of another column such as `scores`.
        neighbours: numbers k of nearest neighbours that vote.
        temperature: of their weights exp(similarity / temperature).
        penalties: candidates for the factor l2 of the penalty l2 / 2 * |W|^2.
        held_out: share of the training features on which the penalty is chosen.
        seed: selects the held-out features.
        device: `auto`, `cpu` or `cuda`.
        similarity: of neighbours: `cosine`, or `dot`, the product of features as they are.
    """

    layer: str
    neighbours: Sequence[int] = NEIGHBOURS
    temperature: float = 0.07
    penalties: Sequence[float] = PENALTIES
    held_out: float = 0.2
    seed: int = 0
    device: str = "auto"
    similarity: str = "cosine"


@dataclass(frozen=True)
class Probed:
    """The result of a probe; accuracies are shares of the test samples, in [0, 1].

    Attributes:
        layer: name of the layer.
        samples: number of training and test samples with a target.
        dimensions: numbers per sample.
        classes: number of classes of the training targets.
        neighbours: k -> accuracy of the vote of k neighbours.
        linear: accuracy of the linear classifier.
        penalty: its penalty.
        held_out: penalty -> accuracy on the held-out features.
    """

    layer: str
    samples: tuple[int, int]
    dimensions: int
    classes: int
    neighbours: dict[int, float]
    linear: float
    penalty: float
    held_out: dict[float, float]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table."""
        shown = [
            (f"{k} nearest neighbours", f"{accuracy:.4f}")
            for k, accuracy in self.neighbours.items()
        ]
        return [*shown, (f"linear classifier (l2 = {self.penalty:g})", f"{self.linear:.4f}")]


def probe(train: str, test: str, settings: ProbeSettings, out: str | None = None) -> Probed:
    """Judge the features of one split by the features of another, and write the result.

    Args:
        train, test: folders from `phasetrain extract`, one for each split.
        settings: of the probe.
        out: file to write; None for `probe.json` next to the folder `test`.

    Raises:
        ConfigError: a folder is not complete or has no such layer, there are no targets, or a
            setting is invalid.
    """
    device = resolve_device(settings.device)
    (features, labels), (others, targets) = (
        _read_features(path, settings.layer) for path in (train, test)
    )
    check_origins(train, test, features.shape[1], others.shape[1])
    _check_settings(settings, len(features))
    classes = int(max(labels.max(), targets.max())) + 1
    features, labels = features.to(device), labels.to(device)
    others, targets = others.to(device), targets.to(device)
    neighbours = classify_by_neighbours(
        *(features, labels, others, settings.neighbours, settings.temperature, classes),
        normalizes=settings.similarity == "cosine",
    )
    chosen, held_out, predicted = classify_linearly(features, labels, others, classes, settings)
    result = Probed(
        layer=settings.layer,
        samples=(len(features), len(others)),
        dimensions=features.shape[1],
        classes=int(labels.max()) + 1,
        neighbours={k: share_equal(votes, targets) for k, votes in neighbours.items()},
        linear=share_equal(predicted, targets),
        penalty=chosen,
        held_out=held_out,
    )
    path = out or f"{test.rstrip('/').rpartition('/')[0] or '.'}/probe.json"
    content = {"train": train, "test": test, "settings": asdict(settings), **asdict(result)}
    open_storage(path).replace_json(path, content)
    return result


def classify_by_neighbours(
    features: Tensor,
    labels: Tensor,
    others: Tensor,
    neighbours: Sequence[int],
    temperature: float,
    classes: int,
    *,
    normalizes: bool = True,
) -> dict[int, Tensor]:
    """Return for each k the class `(M,)` that the k nearest training samples vote for.

    Nearest by cosine similarity s, with weights exp(s / temperature) (Wu et al. 2018,
    arXiv:1805.01978). The lower class wins a tie.

    Args:
        features: training features, float `(N, D)`.
        labels: their classes, int64 `(N,)`.
        others: features to classify, `(M, D)`.
        neighbours: numbers k; a number above N means all.
        temperature: above 0.
        classes: number of classes.
        normalizes: whether s is the cosine; otherwise it is the dot product.
    """
    keys, others = features.float(), others.float()
    if normalizes:
        keys, others = functional.normalize(keys, dim=1), functional.normalize(others, dim=1)
    most = min(max(neighbours), len(keys))
    votes_by_k: dict[int, list[Tensor]] = {k: [] for k in neighbours}
    for queries in torch.split(others, CHUNK):
        similarity, index = _top_similarities(queries, keys, most)
        # relative to the nearest neighbour, so that exp cannot overflow
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        for k, votes in votes_by_k.items():
            ballot = torch.zeros(len(queries), classes, device=keys.device, dtype=weights.dtype)
            # One neighbour at a time: the order of additions is fixed on any device, whereas
            # scatter_add on CUDA is not deterministic.
            for rank in range(min(k, most)):
                ballot[torch.arange(len(queries), device=keys.device), labels[index[:, rank]]] += (
                    weights[:, rank]
                )
            votes.append(ballot.argmax(1))
    return {k: torch.cat(votes) for k, votes in votes_by_k.items()}


def _top_similarities(queries: Tensor, keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the highest similarities `(M, most)` in descending order, and the indices of their
    keys."""
    best = torch.empty(len(queries), 0, device=keys.device)
    indices = torch.empty(len(queries), 0, device=keys.device, dtype=torch.int64)
    for first in range(0, len(keys), 16 * CHUNK):
        similarity = queries @ keys[first : first + 16 * CHUNK].T
        numbers = torch.arange(first, first + similarity.shape[1], device=keys.device).expand_as(
            similarity
        )
        candidates = torch.cat([best, similarity], 1)
        best, chosen = candidates.topk(min(most, candidates.shape[1]), dim=1)
        indices = torch.cat([indices, numbers], 1).gather(1, chosen)
    return best, indices


def classify_linearly(
    features: Tensor, labels: Tensor, others: Tensor, classes: int, settings: ProbeSettings
) -> tuple[float, dict[float, float], Tensor]:
    """Return the best penalty on held-out features, the accuracy of each penalty, and the classes
    of `others`.

    The final classifier is fitted to all training samples. Features are standardized over the
    samples that a classifier is fitted to.
    """
    # on the CPU, because a CUDA generator draws another permutation from the same seed
    generator = torch.Generator().manual_seed(seed_of(settings.seed, "held out"))
    order = torch.randperm(len(features), generator=generator).to(features.device)
    held_out, fitted = order.tensor_split([max(1, round(settings.held_out * len(order)))])
    scores: dict[float, float] = {}
    for penalty in settings.penalties:
        classifier = fit_classifier(features[fitted], labels[fitted], classes, penalty)
        scores[penalty] = share_equal(classifier.classify(features[held_out]), labels[held_out])
    best = max(scores, key=lambda penalty: (scores[penalty], penalty))  # of equal ones the stronger
    return best, scores, fit_classifier(features, labels, classes, best).classify(others)


@dataclass(frozen=True)
class Classifier:
    """A linear classifier of features `(N, D)`.

    Attributes:
        weight: float64 `(classes, D)`, of scaled features.
        bias: `(classes,)`.
        mean, scale: `(D,)`; features are scaled as `(x - mean) / scale`.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor

    def score(self, features: Tensor) -> Tensor:
        """Return a score for each sample and class, float64 `(N, classes)`."""
        return (features.double() - self.mean) / self.scale @ self.weight.T + self.bias

    def classify(self, features: Tensor) -> Tensor:
        """Return the class of each sample, int64 `(N,)`."""
        parts = torch.split(features, CHUNK)
        return torch.cat([self.score(part).argmax(1) for part in parts])


def fit_classifier(features: Tensor, labels: Tensor, classes: int, penalty: float) -> Classifier:
    """Return the linear classifier that minimizes the mean cross entropy plus `penalty / 2 *
    |W|^2`.

    The bias has no penalty. LBFGS in float64 starts from zeros, so that the result is a function of
    the arguments (and of the number of threads).
    """
    weight = torch.zeros(
        classes, features.shape[1], dtype=torch.float64, device=features.device, requires_grad=True
    )
    bias = torch.zeros(classes, dtype=torch.float64, device=features.device, requires_grad=True)
    classifier = Classifier(weight, bias, *_moments(features))
    steps = torch.optim.LBFGS(
        [weight, bias],
        max_iter=STEPS,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def loss_of() -> Tensor:
        steps.zero_grad()
        total = penalty / 2 * weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        total = total.detach()
        for part, target in zip(
            torch.split(features, CHUNK), torch.split(labels, CHUNK), strict=True
        ):
            scores = classifier.score(part)
            loss = functional.cross_entropy(scores, target, reduction="sum") / len(features)
            # a backward pass per chunk, so that one chunk at a time is held as float64
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    steps.step(loss_of)  # type: ignore[no-untyped-call]
    return replace(classifier, weight=weight.detach(), bias=bias.detach())


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each dimension, float64 `(D,)`, with 1 instead of 0."""
    parts = torch.split(features, CHUNK)
    mean = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(features)
    # a second pass, because E[x^2] - E[x]^2 cancels for features far from zero
    squares = torch.stack([(part.double() - mean).square().sum(0) for part in parts]).sum(0)
    scale = (squares / len(features)).sqrt()
    return mean, torch.where(scale > 0, scale, torch.ones_like(scale))


def share_equal(classes: Tensor, targets: Tensor) -> float:
    """Return the share of equal entries."""
    return float((classes == targets).double().mean())


def _read_features(path: str, layer: str) -> tuple[Tensor, Tensor]:
    """Return features `(N, D)` and classes `(N,)` of the samples that have a class, 0 or more."""
    columns: dict[str, Any] = read_columns(path, [layer, "target"])
    features = columns[layer]
    target = columns["target"]
    if target.ndim != 1 or target.is_floating_point():
        raise ConfigError(
            f"{path!r}: the targets are {target.dtype} of shape {tuple(target.shape)}, expected "
            "one class per sample",
            code="probe.no_classes",
        )
    counts = target >= 0
    if not counts.any():
        raise ConfigError(
            f"{path!r}: no sample has a class of 0 or more, so there is nothing to compare with; "
            "expected the features of a split with classes"
        )
    return features[counts].flatten(1), target[counts].long()


def check_origins(train: str, test: str, width: int, other: int) -> None:
    """Check that two feature folders with rows of these widths come from one model.

    Raises:
        ConfigError: they do not.
    """
    if width != other:
        raise ConfigError(
            f"{train!r} has {width} numbers per sample in the layer and {test!r} has {other}; "
            "extract both with one model",
            code="probe.other_width",
        )
    # Two models have no common feature space: the accuracies would be those of chance.
    if _read_origin(train) != _read_origin(test):
        raise ConfigError(
            f"{train!r} and {test!r} are features of different weights; extract both with one "
            "model",
            code="probe.other_weights",
        )


def _read_origin(path: str) -> tuple[Any, ...]:
    """Return the digest of the model of a feature folder, and its pooling."""
    request = read_index(path).get("request", {})
    return request.get("model"), request.get("EXTRACT.pool")


def _check_settings(settings: ProbeSettings, samples: int) -> None:
    if not settings.neighbours or min(settings.neighbours) < 1:
        raise ConfigError(
            f"neighbours = {list(settings.neighbours)}: expected numbers of at least 1"
        )
    if not settings.temperature > 0:
        raise ConfigError(f"temperature = {settings.temperature}: expected a number above 0")
    if not settings.penalties or min(settings.penalties) < 0:
        raise ConfigError(f"l2 = {list(settings.penalties)}: expected numbers of at least 0")
    if not 0 < settings.held_out < 1 or samples < 2:
        raise ConfigError(
            f"held_out = {settings.held_out} of {samples} samples: expected a share between 0 and "
            "1, of at least 2 samples"
        )
