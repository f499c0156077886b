"""A generator of small images of given classes, and its critic."""

import torch
from torch import Tensor, nn

from phasetrain.config.checks import check_at_least
from phasetrain.models.base import MODELS


class ImageGenerator(nn.Module):
    """Makes images in [-1, 1] from noise and classes (Radford et al. 2016, arXiv:1511.06434).

    Args:
        classes: number of classes.
        channels: channels of the images.
        size: height and width, a multiple of 4.
        noise: length of the noise.
        width: channels of the layer before the image.
    """

    def __init__(self, classes: int, channels: int, size: int, noise: int, width: int) -> None:
        super().__init__()
        self.noise = noise
        self._shape = (2 * width, size // 4, size // 4)
        self.classes = nn.Embedding(classes, noise)
        self.project = nn.Linear(2 * noise, 2 * width * (size // 4) ** 2, bias=False)
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return images `(N, channels, size, size)` from noise `(N, noise)` and classes `(N,)`."""
        both = torch.cat([noise, self.classes(labels)], dim=1)
        images: Tensor = self.layers(self.project(both).view(-1, *self._shape))
        return images


class ImageCritic(nn.Module):
    """Scores how real images of given classes look, by a projection on the class (Miyato and Koyama
    2018, arXiv:1802.05637).

    Args:
        classes: number of classes.
        channels: channels of the images.
        size: height and width, a multiple of 4.
        width: channels of the first layer.
    """

    def __init__(self, classes: int, channels: int, size: int, width: int) -> None:
        super().__init__()
        features = 2 * width * (size // 4) ** 2
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Flatten(),
        )
        self.score = nn.Linear(features, 1)
        self.classes = nn.Embedding(classes, features)
        nn.init.normal_(self.classes.weight, std=features**-0.5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return scores `(N,)`, larger for images that look real."""
        features = self.layers(images)
        match = (features * self.classes(labels)).sum(1)
        scores: Tensor = self.score(features).squeeze(1) + match
        return scores


@MODELS.register("conditional_gan")
class ConditionalGAN(nn.Module):
    """A generator and a critic of small images, for the task `gan`.

    Args:
        classes: number of classes.
        channels: channels of the images.
        size: height and width of the images, a multiple of 4.
        noise: length of the generator's noise.
        width: channels next to the image, in both networks.

    Raises:
        ValueError: a size is below 1, or `size` is not a multiple of 4.
    """

    def __init__(
        self, classes: int, channels: int = 1, size: int = 28, noise: int = 32, width: int = 32
    ) -> None:
        super().__init__()
        check_at_least(1, classes=classes, channels=channels, noise=noise, width=width)
        if size < 4 or size % 4:
            raise ValueError(f"size = {size}: expected a multiple of 4")
        self.generator = ImageGenerator(classes, channels, size, noise, width)
        self.critic = ImageCritic(classes, channels, size, width)
