"""Prediction of a momentum encoder's embedding of another view (BYOL)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from phasetrain.losses.base import LOSSES
from phasetrain.losses.self_supervised.multi_view import pairs_with_teacher


@LOSSES.register("byol")
class BYOL(nn.Module):
    """Distance between a view's prediction and the teacher's embedding (Grill et al. 2020,
    arXiv:2006.07733, eq. 2).

    For a prediction p and the teacher's embedding z of another view the term is |p/|p| - z/|z||^2 =
    2 - 2 cos(p, z); the loss is the mean over samples and over all pairs of different views. (The
    paper sums over its two pairs.) Samples do not depend on each other.
    """

    coupled = False
    taught = True

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples, a scalar in [0, 4], of views and targets `(N, D)`."""
        pairs = pairs_with_teacher(views, targets)
        teacher = list(targets or ())
        alike = [
            cosine_similarity(views[view], teacher[taught].detach(), dim=1)
            for view, taught in pairs
        ]
        return (2 - 2 * torch.stack(alike)).sum() / (len(pairs) * max(len(views[0]), 1))
