"""BYOL: predict the momentum encoder's embedding of another view."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from phasetrain.addons.vision.self_supervised_losses.multi_view import pair_views_with_teacher
from phasetrain.losses.base import LOSSES


@LOSSES.register("byol")
class BYOL(nn.Module):
    """Distance between the prediction of a view and the teacher's embedding (Grill et al. 2020,
    arXiv:2006.07733, eq. 2).

    For a prediction p and the teacher's embedding z of another view the term is |p/|p| - z/|z||^2 =
    2 - 2 cos(p, z); the loss is the mean over samples and over all pairs of different views. (The
    paper sums over its two pairs.) Samples are independent of each other.
    """

    coupled = False
    uses_teacher = True

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples, a scalar in [0, 4], of views and targets `(N, D)`."""
        pairs = pair_views_with_teacher(views, targets)
        teacher = list(targets or ())
        similarities = [
            cosine_similarity(views[view], teacher[other].detach(), dim=1) for view, other in pairs
        ]
        # max(..., 1): a rank without samples contributes 0, not NaN.
        return (2 - 2 * torch.stack(similarities)).sum() / (len(pairs) * max(len(views[0]), 1))
