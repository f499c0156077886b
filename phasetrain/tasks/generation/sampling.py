"""How the next token is drawn from the scores of a language model."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from phasetrain.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the scores; 0 takes the most probable token.
        top_k: draw from the k most probable tokens only.
        top_p: draw from the most probable tokens only whose probabilities sum to at least p
            (Holtzman et al. 2020, arXiv:1904.09751).
        seed: seed of the texts.

    Raises:
        ConfigError: a value is outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature, self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k, self.top_k is None or self.top_k >= 1, "at least 1"),
            "top_p": (self.top_p, self.top_p is None or 0 < self.top_p <= 1, "above 0, up to 1"),
        }
        for name, (value, is_valid, expected) in ranges.items():
            if not is_valid:
                raise ConfigError(f"{name} = {value}: expected {expected}", code="generate.range")


def draw_token(scores: Tensor, sampling: Sampling, generator: Generator) -> int:
    """Return the next token.

    Args:
        scores: logits of the tokens, `(V,)`.
        sampling: how to draw.
        generator: a generator of the CPU; one number is drawn from it, unless the temperature is 0.
    """
    # On the CPU and in float64, so that equal scores give equal tokens on any device.
    scores = scores.detach().double().cpu()
    # Stable: of equal scores the smaller token comes first, on every machine.
    ordered, tokens = scores.sort(descending=True, stable=True)
    if sampling.temperature == 0:
        return int(tokens[0])
    if sampling.top_k is not None:
        ordered = ordered[: sampling.top_k]
    probabilities = torch.softmax(ordered / sampling.temperature, dim=0)
    if sampling.top_p is not None:
        # Tokens before which the sum is still below p; always the first one.
        kept = int((probabilities.cumsum(0) - probabilities < sampling.top_p).sum())
        probabilities = probabilities[: max(1, kept)]
    sums = probabilities.cumsum(0)
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    place = int(torch.searchsorted(sums, drawn, right=True))
    return int(tokens[min(place, len(sums) - 1)])
