"""NPID: tell each training sample from the others, which a memory holds."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from phasetrain.addons.vision.self_supervised_losses.multi_view import gather_embeddings
from phasetrain.config.checks import check_at_least, check_fraction, check_positive
from phasetrain.distributed import World, gather_rows, reduce
from phasetrain.losses.base import LOSSES

Contrast = Literal["nce", "cross_entropy"]


@LOSSES.register("npid")
class NPID(nn.Module):
    """Discrimination of instances with a memory (Wu et al. 2018, arXiv:1805.01978).

    The memory holds a normalised embedding m of every training sample. For the normalised embedding
    z of a view, the memory m_0 of its own sample and m_1, ..., m_K of others, drawn at random, the
    term with `contrast: cross_entropy` is

            -log exp(z m_0 / t) / sum_k exp(z m_k / t).

    With `nce` it is noise-contrastive estimation (equation 8): with S samples and the probabilities
    p_k = exp(z m_k / t) / partition,

            -log p_0 / (p_0 + K / S) - sum_k log (K / S) / (p_k + K / S),

    where the partition is S times the mean of exp(z m / t) in the first batch. The loss is the mean
    over views and samples. After each training batch, momentum moves the memory of its samples
    towards their first views. Samples outside of the training split have no memory, so there are
    no tests.

    Args:
        dimensions: fact; D, the size of an embedding.
        train_samples: fact; S, the number of training samples.
        negatives: K.
        temperature: t.
        momentum: share of the memory that an update keeps, in [0, 1].
        contrast: `nce` or `cross_entropy`.
        world: fact; the ranks of the run.

    Attributes:
        memory: `(S, D)`, initially random directions; the same on all ranks.
        partition: 0-d; 0 before the first batch.

    Raises:
        ValueError: a size or temperature is not positive, momentum is outside [0, 1], or an unknown
            contrast.
    """

    coupled = True
    uses_teacher = False
    contrasts_with_memory = True
    memory: Tensor
    partition: Tensor

    def __init__(
        self,
        dimensions: int,
        train_samples: int,
        negatives: int = 4096,
        temperature: float = 0.07,
        momentum: float = 0.5,
        contrast: Contrast = "nce",
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, negatives=negatives)
        check_positive(temperature=temperature)
        check_fraction(momentum=momentum)
        if contrast not in ("nce", "cross_entropy"):
            raise ValueError(f"contrast = {contrast!r}: expected nce or cross_entropy")
        self.negatives = negatives
        self.temperature = temperature
        self.momentum = momentum
        self.contrast = contrast
        self._world = world or World()
        self._places = torch.zeros(0, dtype=torch.int64)
        self.register_buffer("memory", normalize(torch.randn(train_samples, dimensions), dim=1))
        self.register_buffer("partition", torch.zeros(()))

    def select_samples(self, places: Tensor) -> None:
        """Set the places of the samples of the next batch in the training data, int64 `(N,)`."""
        self._places = places

    def forward(self, views: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> Tensor:
        """Return the mean over the samples of this rank, a scalar, of views `(N, D)`."""
        embeddings = [normalize(view, dim=1) for view in views]
        losses = []
        for embedding in embeddings:
            drawn = self._draw_negatives(len(embedding))
            rows = self.memory[torch.cat([self._places[:, None], drawn], dim=1)]
            scores = torch.einsum("nkd,nd->nk", rows.to(embedding), embedding) / self.temperature
            losses.append(self._contrast(scores) / max(len(embedding), 1))
        # After the losses: no view is compared with itself.
        self._remember(embeddings[0].detach())
        return torch.stack(losses).mean()

    def _draw_negatives(self, count: int) -> Tensor:
        """Return places of other samples, `(count, K)`; the own one may be among them, as in the
        paper."""
        shape = (count, self.negatives)
        return torch.randint(len(self.memory), shape, device=self._places.device)

    def _contrast(self, scores: Tensor) -> Tensor:
        """Return the sum over samples for scores `(N, 1 + K)`, the positive one first."""
        if self.contrast == "cross_entropy":
            return -scores.log_softmax(dim=1)[:, 0].sum()
        weights = scores.exp()
        # In every step, not only in the first: a branch would wait for the device.
        estimate = reduce(self._world, weights.mean(), "mean") * len(self.memory)
        partition = torch.where(self.partition > 0, self.partition, estimate)
        self.partition.copy_(partition)
        probabilities = weights / partition
        noise = self.negatives / len(self.memory)
        # The smallest step of float32 keeps the logarithm finite, as in the authors' code.
        share = noise + torch.finfo(torch.float32).eps
        positives = (probabilities[:, 0] / (probabilities[:, 0] + share)).log()
        negatives = (noise / (probabilities[:, 1:] + share)).log()
        return -(positives.sum() + negatives.sum())

    @torch.no_grad()
    def _remember(self, embeddings: Tensor) -> None:
        # Of all ranks, so that their memories stay bit-identical.
        everyone, _ = gather_embeddings(self._world, embeddings, equal=True)
        places = gather_rows(self._world, self._places)
        moved = torch.lerp(everyone.to(self.memory), self.memory[places], self.momentum)
        self.memory[places] = normalize(moved, dim=1)
