"""SimCLR: contrast two views of a sample with all other samples."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    gather_embeddings,
    pair_views,
)
from phasetrain.config.checks import check_positive
from phasetrain.distributed import World
from phasetrain.losses.base import LOSSES


@LOSSES.register("simclr")
class SimCLR(nn.Module):
    """Normalised temperature-scaled cross entropy, NT-Xent (Chen et al. 2020, arXiv:2002.05709,
    equation 1).

    For two views with normalised embeddings a and b of the G samples on all ranks, the term of a_i
    is

            -log exp(a_i b_i / t) / (sum_j exp(a_i b_j / t) + sum_{j != i} exp(a_i a_j / t)),

    and likewise for b_i; the loss is their mean, or the mean over all pairs of views if there are
    more than two.

    Args:
        temperature: t.
        world: fact; the ranks of the run.

    Raises:
        ValueError: the temperature is not positive.
    """

    coupled = True
    uses_teacher = False

    def __init__(self, temperature: float = 0.1, world: World | None = None) -> None:
        super().__init__()
        check_positive(temperature=temperature)
        self.temperature = temperature
        self._world = world or World()

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this rank, a scalar, of V views `(N, D)`."""
        pairs = pair_views(views)
        local = torch.stack([normalize(view, dim=1) for view in views], dim=1)  # (N, V, D)
        everyone, first = gather_embeddings(self._world, local, equal=self.training)
        rows = first + torch.arange(len(local), device=local.device)
        # Both directions of a pair, because the negatives of a_i within its own view differ from
        # those of b_i.
        losses = [
            self._compute_contrast(local[:, view], everyone[:, view], everyone[:, other], rows)
            for pair in pairs
            for view, other in (pair, pair[::-1])
        ]
        return torch.stack(losses).mean()

    def _compute_contrast(
        self, anchors: Tensor, same: Tensor, other: Tensor, rows: Tensor
    ) -> Tensor:
        """Return the mean term of anchors `(N, D)`, which are the given rows of their view `same`
        `(G, D)`."""
        across = anchors @ other.T / self.temperature
        within = anchors @ same.T / self.temperature
        # An anchor is not contrasted with itself: its own column gets probability 0.
        itself = rows[:, None] == torch.arange(len(same), device=rows.device)
        logits = torch.cat([across, within.masked_fill(itself, -torch.inf)], dim=1)
        return cross_entropy(logits, rows, reduction="sum") / max(len(anchors), 1)
