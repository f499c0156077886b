"""Drawn images with masks, for runs that segment."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from phasetrain.data import DATASETS


@DATASETS.register("drawn_masks")
class DrawnMasks:
    """A bright rectangle (class 1) or ring (class 2) on noise, with its mask, box and label.

    The last row of each mask does not count.
    """

    field_kinds: ClassVar[dict[str, str]] = {"image": "image", "mask": "mask"}

    def __init__(self, samples: int = 200, size: int = 16, first: int = 0) -> None:
        self.samples = samples
        self.size = size
        self.first = first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        top, left = torch.randint(1, self.size - 9, (2,), generator=generator).tolist()
        kind = 1 + index % 2
        mask = torch.zeros(self.size, self.size, dtype=torch.int64)
        mask[top : top + 8, left : left + 8] = kind
        if kind == 2:
            mask[top + 3 : top + 5, left + 3 : left + 5] = 0
        noise = torch.rand(1, self.size, self.size, generator=generator)
        image = 0.5 * noise + 0.25 * mask[None]
        mask[-1] = -100
        return {"image": image, "mask": mask}

    def facts(self) -> dict[str, Any]:
        return {
            "classes": 3,
            "class_names": ("nothing", "rectangle", "ring"),
            "channels": 1,
            "input_shape": (1, self.size, self.size),
        }


AUGMENTED = (
    "{name: random_crop, size: 16, padding: 3}, random_flip, "
    "{name: apply, transforms: [{name: random_rotate, degrees: 30}]}"
)
WORDS = [
    "RUN.imports=[segment_parts]",
    "DATA.TRAIN={dataset: drawn_masks}",
    "DATA.TEST={dataset: drawn_masks, first: 10000, samples: 70}",
    f"DATA.TRAIN.transforms=[{AUGMENTED}]",
    "MODEL={name: unet, width: 4, depth: 2, dropout: 0.1}",
    "LOSS.ignore_index=-100",
    "METERS={accuracy: null, mean_iou: {}, dice: {}, pixel_accuracy: {}}",
]
"""Overrides of a run that segments the drawn images."""
