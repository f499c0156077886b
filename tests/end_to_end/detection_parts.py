"""Drawn images with boxes, and a model that finds them, for runs that detect."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from phasetrain.data import DATASETS
from phasetrain.losses import LOSSES
from phasetrain.models import MODELS


@DATASETS.register("drawn_boxes")
class DrawnBoxes:
    """No, one or two bright squares of 4 pixels on dim noise; the brighter kind is class 1."""

    field_kinds: ClassVar[dict[str, str]] = {"image": "image", "boxes": "boxes", "labels": "labels"}

    def __init__(self, samples: int = 70, first: int = 0) -> None:
        self.samples = samples
        self.first = first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        image = torch.rand(1, 16, 16, generator=generator) / 4
        count = int(torch.randint(0, 3, (), generator=generator))
        labels = torch.randint(0, 2, (count,), generator=generator)
        cells = torch.randperm(16, generator=generator)[:count]
        corners = torch.stack([cells % 4, cells // 4], 1) * 4
        light = 0.25 + 0.3 * labels + 0.5 * torch.rand(count, generator=generator)
        for (left, top), one in zip(corners.tolist(), light, strict=True):
            image[0, top : top + 4, left : left + 4] += one
        boxes = torch.cat([corners, corners + 4], 1).float()
        return {"image": image, "boxes": boxes, "labels": labels}

    def facts(self) -> dict[str, Any]:
        return {"classes": 2, "class_names": ("dim", "bright"), "channels": 1}


@MODELS.register("box_finder")
class BoxFinder(nn.Module):
    """Scores the 16 cells of an image for both classes by their brightness.

    Scores are multiples of 1/8, so that many are equal, and the last bits of a sum over a smaller
    batch do not matter.
    """

    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.cells = nn.AvgPool2d(width)
        self.dropout = nn.Dropout(dropout)
        self.center = nn.Parameter(torch.tensor([[0.5], [0.8]]))
        self.slope = nn.Parameter(torch.tensor(60.0))
        corners = torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], 1) * width
        self.register_buffer("boxes", torch.cat([corners, corners + width], 1).float())

    def forward(self, image: Tensor) -> dict[str, Any]:
        brightness = self.dropout(self.cells(image).flatten(2))
        logits = 3 - self.slope * (brightness - self.center).square()
        scores = logits.detach().sigmoid().mul(8).round().div(8).max(1)
        return {
            "logits": logits,
            "boxes": self.boxes.expand(len(image), -1, -1),
            "scores": scores.values,
            "labels": scores.indices,
        }


@LOSSES.register("box_cells")
def cells(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Binary cross entropy of the cells in which boxes are."""
    truth = torch.zeros_like(output["logits"])
    image, box = target["mask"].nonzero(as_tuple=True)
    corner = target["boxes"][image, box].long() // 4
    truth[image, target["labels"][image, box], corner[:, 1] * 4 + corner[:, 0]] = 1
    return nn.functional.binary_cross_entropy_with_logits(output["logits"], truth)


class ScoresInOrder(Metric):
    """A metric of torchmetrics that depends on the order of its images."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", [], dist_reduce_fx=None)

    def update(self, scores: Tensor) -> None:
        """Keep the scores of each image."""
        self.found += list(scores)

    def compute(self) -> Tensor:
        """Return the sum of the highest scores, each with the number of its image as weight."""
        numbers = torch.arange(1, len(self.found) + 1, dtype=torch.float64)
        return (numbers * torch.stack([one.max() for one in self.found]).double()).sum()


WORDS = [
    "RUN.imports=[detection_parts, process_parts]",
    "DATA.TRAIN={dataset: drawn_boxes, samples: 150, transforms: [random_flip]}",
    "DATA.TEST={dataset: drawn_boxes, first: 10000}",
    "DATA.TRAIN.collate={name: pad, fields: [boxes, labels]}",
    "DATA.TEST.collate={name: pad, fields: [boxes, labels]}",
    "MODEL={name: box_finder}",
    "LOSS={name: box_cells}",
    "METERS={accuracy: null, map: {name: mean_average_precision, per_class: true}, "
    "ordered: {name: detection_parts.ScoresInOrder}}",
]
"""Overrides of a run that detects the drawn squares."""
