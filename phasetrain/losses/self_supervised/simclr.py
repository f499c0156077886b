"""Contrast of two views of a sample with all other samples (SimCLR)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from phasetrain.distributed import World
from phasetrain.losses.base import LOSSES
from phasetrain.losses.self_supervised.multi_view import check_positive, of_all, pairs_of_views


@LOSSES.register("simclr")
class SimCLR(nn.Module):
    """Normalised temperature-scaled cross entropy, NT-Xent (Chen et al. 2020, arXiv:2002.05709,
    equation 1).

    For two views with normalised embeddings a and b of G samples on all processes, the term of a_i
    is

        -log exp(a_i b_i / t) / (sum_j exp(a_i b_j / t) + sum_{j != i} exp(a_i a_j / t)),

    that of b_i likewise; the loss is their mean. With more than two views it is the mean over all
    pairs of views.

    Args:
        temperature: t.
        world: fact; the processes.

    Raises:
        ValueError: a temperature that is not above 0.
    """

    coupled = True
    taught = False

    def __init__(self, temperature: float = 0.1, world: World | None = None) -> None:
        super().__init__()
        check_positive(temperature=temperature)
        self.temperature = temperature
        self._world = world or World()

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this process, a scalar, of V views `(N, D)`."""
        pairs = pairs_of_views(views)
        own = torch.stack([normalize(view, dim=1) for view in views], dim=1)  # (N, V, D)
        everyone, first = of_all(self._world, own, equal=self.training)
        places = first + torch.arange(len(own), device=own.device)
        losses = [
            self._contrast(own[:, one], everyone[:, one], everyone[:, other], places)
            for pair in pairs
            for one, other in (pair, pair[::-1])
        ]
        return torch.stack(losses).mean()

    def _contrast(self, anchors: Tensor, same: Tensor, other: Tensor, places: Tensor) -> Tensor:
        """Return the mean term of anchors `(N, D)`, which stand at `places` of their own view
        `same` `(G, D)`."""
        across = anchors @ other.T / self.temperature
        within = anchors @ same.T / self.temperature
        themselves = places[:, None] == torch.arange(len(same), device=places.device)
        logits = torch.cat([across, within.masked_fill(themselves, -torch.inf)], dim=1)
        return cross_entropy(logits, places, reduction="sum") / max(len(anchors), 1)
