"""Cross-correlation of two views brought to the identity (Barlow Twins)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phasetrain.distributed import World
from phasetrain.losses.base import LOSSES
from phasetrain.losses.self_supervised.multi_view import check_positive, of_all, pairs_of_views

EPSILON = 1e-5
"""Added to variances, as batch norm does in the authors' implementation."""


@LOSSES.register("barlow_twins")
class BarlowTwins(nn.Module):
    """Redundancy reduction (Zbontar et al. 2021, arXiv:2103.03230, equations 1 and 2).

    With c_ij the mean over the G samples of all processes of a_i b_j, where a and b are the
    embeddings of two views, each dimension brought to mean 0 and variance 1 over the samples, the
    loss is

        scale * (sum_i (1 - c_ii)^2 + off_diagonal * sum_{i != j} c_ij^2),

    with more than two views its mean over all pairs of views.

    Args:
        off_diagonal: weight of the redundancy term (lambda in the paper).
        scale: factor of the whole.
        world: fact; the processes.

    Raises:
        ValueError: a weight or factor that is not above 0.
    """

    coupled = True
    taught = False

    def __init__(
        self, off_diagonal: float = 0.0051, scale: float = 1.0, world: World | None = None
    ) -> None:
        super().__init__()
        check_positive(off_diagonal=off_diagonal, scale=scale)
        self.off_diagonal = off_diagonal
        self.scale = scale
        self._world = world or World()

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the loss over the samples of all processes, a scalar, of V views `(N, D)`."""
        pairs = pairs_of_views(views)
        everyone, _ = of_all(
            self._world, torch.stack(list(views), dim=1), equal=self.training
        )  # (G, V, D)
        variance, mean = torch.var_mean(everyone, dim=0, correction=0)
        standard = (everyone - mean) / (variance + EPSILON).sqrt()
        return (
            self.scale
            * torch.stack(
                [self._redundancy(standard[:, a], standard[:, b]) for a, b in pairs]
            ).mean()
        )

    def _redundancy(self, one: Tensor, other: Tensor) -> Tensor:
        correlation = one.T @ other / len(one)
        diagonal = correlation.diagonal()
        off_diagonal = correlation.square().sum() - diagonal.square().sum()
        return (1 - diagonal).square().sum() + self.off_diagonal * off_diagonal
