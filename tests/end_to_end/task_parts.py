"""Parts of runs of several heads and of models with their own loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phasetrain.data import DATASETS
from phasetrain.data.datasets import TensorSamples
from phasetrain.data.datasets.digits import load_digits
from phasetrain.engine.batch import IGNORED
from phasetrain.losses import LOSSES, LoggingLoss
from phasetrain.models import MODELS


@DATASETS.register("partly_labelled")
def partly_labelled(samples: int = 120) -> TensorSamples:
    """Scores of four classes; of three targets one is the class with the highest score, one is
    another class, and one does not count."""
    numbers = torch.arange(samples)
    best = numbers // 3 % 4
    targets = (best + numbers % 3) % 4
    targets[numbers % 3 == 2] = IGNORED
    scores = torch.eye(4)[best] + 0.1 * torch.rand(
        samples, 4, generator=torch.Generator().manual_seed(4)
    )
    return TensorSamples(scores, targets, class_names=("cat", "dog", "cow", "hen"))


@MODELS.register("scaled_scores")
class ScaledScores(nn.Module):
    """Returns its inputs times a positive weight, so that the predicted classes never change."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.log_scale.exp()


class Marked:
    """Digits with two targets: the digit, and whether it is odd."""

    def __init__(self, split: str = "train") -> None:
        self.inner = load_digits(split)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, digit = self.inner[index]
        return image, {"digit": digit, "odd": (digit % 2).float()[None]}

    def facts(self) -> Any:
        return self.inner.facts()

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


DATASETS.register("marked")(Marked)


@DATASETS.register("unmarked")
class Unmarked(Marked):
    """Digits without targets."""

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.inner[index][0], None


@MODELS.register("own_loss")
class OwnLoss(nn.Module):
    """A classifier that computes its losses itself."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, images: Tensor, target: Tensor) -> dict[str, Tensor]:
        scores = self.layer(images.flatten(1))
        return {
            "class": nn.functional.cross_entropy(scores, target),
            "size": 0.01 * scores.square().mean(),
            "scores": scores,
        }


class Terms(LoggingLoss):
    """Cross entropy and the size of the scores, logged with their graphs."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        ce = cross_entropy(output, target)
        size = output.square().mean()
        self.logs = {"ce": ce, "size": size}
        return ce + 0.1 * size


@LOSSES.register("rising")
class Rising(LoggingLoss):
    """Cross entropy plus the squares of the scores, with a weight that rises over the training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0
        self.updates = 0

    def advance(self, where: float, updates: int) -> None:
        """Set the weight."""
        self.weight = where
        self.updates = updates

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum, a scalar."""
        self.logs = {"weight": torch.tensor(self.weight), "updates": torch.tensor(self.updates)}
        return cross_entropy(output, target) + self.weight * output.square().mean()
