"""Barlow Twins: the cross-correlation of two views is driven towards the identity."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    gather_embeddings,
    pair_views,
)
from phasetrain.config.checks import check_positive
from phasetrain.distributed import World
from phasetrain.losses.base import LOSSES

EPSILON = 1e-5
"""Added to variances, as the batch norm of the authors' implementation does."""


@LOSSES.register("barlow_twins")
class BarlowTwins(nn.Module):
    """Redundancy reduction (Zbontar et al. 2021, arXiv:2103.03230, equations 1 and 2).

    Let c_ij be the mean of a_i b_j over the G samples of all ranks, for the embeddings a and b of
    two views, each dimension standardised over the samples: of each view by itself, as in the paper
    and the authors' code, or of all views together, as in VISSL. The loss is

            scale * (sum_i (1 - c_ii)^2 + off_diagonal * sum_{i != j} c_ij^2),

    or its mean over all pairs of views if there are more than two.

    Args:
        off_diagonal: weight of the redundancy term (lambda in the paper).
        scale: factor of the loss.
        joint: standardise all views together.
        world: fact; the ranks of the run.

    Raises:
        ValueError: a weight or factor is not positive.
    """

    coupled = True
    uses_teacher = False

    def __init__(
        self,
        off_diagonal: float = 0.0051,
        scale: float = 1.0,
        *,
        joint: bool = False,
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_positive(off_diagonal=off_diagonal, scale=scale)
        self.off_diagonal = off_diagonal
        self.scale = scale
        self.joint = joint
        self._world = world or World()

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the loss over the samples of all ranks, a scalar, for V views `(N, D)`."""
        pairs = pair_views(views)
        stacked = torch.stack(list(views), dim=1)  # (N, V, D): one collective for all views
        everyone, _ = gather_embeddings(self._world, stacked, equal=self.training)  # (G, V, D)
        samples = (0, 1) if self.joint else (0,)
        # Population variance (correction 0), as batch norm computes it.
        variance, mean = torch.var_mean(everyone, dim=samples, correction=0)
        standard = (everyone - mean) / (variance + EPSILON).sqrt()
        terms = [self._compute_redundancy(standard[:, a], standard[:, b]) for a, b in pairs]
        return self.scale * torch.stack(terms).mean()

    def _compute_redundancy(self, one: Tensor, other: Tensor) -> Tensor:
        correlation = one.T @ other / len(one)
        diagonal = correlation.diagonal()
        off_diagonal = correlation.square().sum() - diagonal.square().sum()
        return (1 - diagonal).square().sum() + self.off_diagonal * off_diagonal
