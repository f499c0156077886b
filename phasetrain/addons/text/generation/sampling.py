"""How the next token is drawn from the scores of a language model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from phasetrain.config.sections.value_types import ValueType
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
        ConfigError: a value is of a wrong type or outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_argument("temperature", self.temperature, float, ge=0)
        check_argument("top_k", self.top_k, int | None, ge=1)
        check_argument("top_p", self.top_p, float | None, gt=0, le=1)
        check_argument("seed", self.seed, int)


def check_argument(name: str, value: Any, annotation: Any, **bounds: float) -> None:
    """Raise ConfigError unless a value has a type and is within bounds: `ge`, `gt`, `le`, `lt`."""
    expected = ValueType(annotation, bounds)
    if not expected.fits(value):
        raise ConfigError(
            f"{name} = {value!r}: expected {expected.text}",
            code="generate.range",
        )


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
    index = int(torch.searchsorted(sums, drawn, right=True))
    return int(tokens[min(index, len(sums) - 1)])
