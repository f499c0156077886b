"""Parts of runs of several heads and of models with their own loss."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phasetrain.data import DATASETS
from phasetrain.data.datasets.digits import load_digits
from phasetrain.losses import LoggingLoss
from phasetrain.models import MODELS


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
