"""A model with complex weights and buffers."""

import torch
from torch import Tensor, nn


class Spectral(nn.Module):
    """Multiplies the first frequencies of an image by weights, as a Fourier neural operator does.

    Args:
        modes: number of frequencies.
        classes, pixels: facts.
    """

    def __init__(self, modes: int = 8, classes: int = 10, pixels: int = 64) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, modes, dtype=torch.cfloat))
        self.head = nn.Linear(2 * pixels, classes)
        self.register_buffer("mean", torch.zeros(modes, dtype=torch.cfloat))
        self.register_buffer("wide", torch.zeros(modes, dtype=torch.cdouble))

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1)
        spectrum = torch.fft.rfft(rows)[:, None, : self.modes]
        if self.training:
            self.mean.lerp_(spectrum.detach().mean((0, 1)), 0.1)
            self.wide += self.mean
        kept = torch.fft.irfft((spectrum - self.mean) * self.weight, n=rows.shape[1])
        output: Tensor = self.head(kept.flatten(1))
        return output
