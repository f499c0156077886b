"""Distance between the distributions of generated and real samples."""

import math

import torch
from torch import Tensor

from phasetrain.engine.batch import GeneratedOutput, StepOutput
from phasetrain.meters.base import METERS, Meter


@METERS.register("frechet_distance")
class FrechetDistance(Meter):
    """Fréchet distance between normal distributions fitted to the features of generated and real
    samples (Heusel et al. 2017, arXiv:1706.08500); 0 if mean and covariance agree.

    Takes `features` and `real_features` of a `GeneratedOutput`, as the task `gan` returns it, each
    `(N, D)`. It keeps the features of a phase, 8 * D bytes per sample, and computes in float64. It
    depends on the classifier that computes the features and, with few samples, on their number:
    compare values with the same of both only.

    Raises:
        ValueError: on update: an output without features.
    """

    better = "smaller"
    needs_target = False

    generated: Tensor
    real: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_rows("generated")
        self.add_rows("real")

    def update(self, out: StepOutput) -> None:
        """Append the features of one step."""
        if (
            not isinstance(out, GeneratedOutput)
            or out.features is None
            or out.real_features is None
        ):
            raise ValueError(
                "frechet_distance takes features of generated and real samples, which the task gan "
                "returns in tests; limit it to them with splits: [TEST]"
            )
        self.append_rows("generated", out.features, out.mask)
        self.append_rows("real", out.real_features, out.mask)

    def compute(self) -> float:
        """Return the distance; NaN with fewer than two samples."""
        if len(self.generated) < 2 or len(self.real) < 2:
            return math.nan
        return frechet_distance(self.generated, self.real)


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Return the Fréchet distance of normal distributions fitted to rows `(N, D)` and `(M, D)`."""
    first = one.double().cpu()
    second = other.double().cpu()
    means = (first.mean(0) - second.mean(0)).square().sum()
    size = first.shape[1]
    # `cov` of a single feature is a scalar.
    covariance = torch.cov(first.T).reshape(size, size)
    other_covariance = torch.cov(second.T).reshape(size, size)
    # The trace of the root of A B is the sum of the roots of the eigenvalues of sqrt(A) B sqrt(A),
    # which is symmetric, unlike A B.
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    product = torch.linalg.eigvalsh(root @ other_covariance @ root)
    trace = product.clamp(min=0).sqrt().sum()
    total = means + covariance.trace() + other_covariance.trace()
    # Rounding may leave a small negative number for equal distributions.
    return max(float(total - 2 * trace), 0.0)
