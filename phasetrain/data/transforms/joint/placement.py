"""Where the pixels of a transformed image come from, for images, masks, boxes and key points."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample

from phasetrain.data.transforms.joint.kinds import FieldKind


@dataclass(frozen=True)
class Placement:
    """An affine map from the result of a transform to the image that it was made of.

    Points are x, y in pixels from the upper left corner, so that the first pixel has its center at
    (0.5, 0.5). The point p of the result shows the point `matrix @ p + offset` of the image.

    Attributes:
        matrix: two rows of two numbers.
        offset: two numbers.
        size: height and width of the result.

    Example:
        >>> mirrored = Placement(((-1.0, 0.0), (0.0, 1.0)), (float(width), 0.0), (height, width))
    """

    matrix: tuple[tuple[float, float], tuple[float, float]]
    offset: tuple[float, float]
    size: tuple[int, int]

    @classmethod
    def crop(
        cls, top: float, left: float, tall: float, wide: float, size: tuple[int, int]
    ) -> "Placement":
        """Return the placement of a rectangle that is resized to `size`."""
        return cls(((wide / size[1], 0.0), (0.0, tall / size[0])), (left, top), size)

    @property
    def is_mirrored(self) -> bool:
        """Whether left and right are swapped."""
        (a, b), (c, d) = self.matrix
        return a * d - b * c < 0

    def locate_centers(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return x and y in the image of the center of each pixel of the result, which broadcast to
        `(H, W)`."""
        (a, b), (c, d) = self.matrix
        x = np.arange(self.size[1], dtype=np.float64)[None, :] + 0.5
        y = np.arange(self.size[0], dtype=np.float64)[:, None] + 0.5
        if b == c == 0:  # a row for x and a column for y are much faster than two planes
            return a * x + self.offset[0], d * y + self.offset[1]
        return a * x + b * y + self.offset[0], c * x + d * y + self.offset[1]

    def take_nearest(self, values: Tensor, fill: float) -> Tensor:
        """Return `(..., H, W)` of the nearest pixels of `values`; `fill` outside of the image."""
        x, y = self.locate_centers()
        height, width = values.shape[-2:]
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        columns = torch.from_numpy(np.clip(np.floor(x), 0, width - 1).astype(np.int64))
        rows = torch.from_numpy(np.clip(np.floor(y), 0, height - 1).astype(np.int64))
        pixels = values[..., rows, columns]
        if inside.all():
            return pixels
        return pixels.masked_fill(torch.from_numpy(~inside), fill)

    def take_bilinear(self, image: Tensor) -> Tensor:
        """Return `(C, H, W)`, interpolated; 0 outside of the image."""
        x, y = self.locate_centers()
        height, width = image.shape[-2:]
        # With align_corners=False, -1 and 1 are the outer edges of the image.
        x, y = np.broadcast_arrays(x / width * 2 - 1, y / height * 2 - 1)
        grid = np.stack([x, y], axis=-1)
        pixels: Tensor = grid_sample(
            image[None], torch.from_numpy(grid)[None].to(image.dtype), align_corners=False
        )
        return pixels[0]

    def move_points(self, points: Tensor) -> Tensor:
        """Return the places in the result of points of the image, `(..., 2)`, float64."""
        (a, b), (c, d) = self.matrix
        scale = a * d - b * c
        if math.isclose(scale, 0.0, abs_tol=1e-12):
            raise ValueError("the placement shows the whole image at one point")
        x = points[..., 0].double() - self.offset[0]
        y = points[..., 1].double() - self.offset[1]
        return torch.stack([(d * x - b * y) / scale, (a * y - c * x) / scale], dim=-1)


def place_boxes(boxes: Tensor, placement: Placement) -> Tensor:
    """Return boxes `(K, 4)` around the moved corners, clipped to the result."""
    x1, y1, x2, y2 = boxes.unbind(1)
    corners = torch.stack([x1, y1, x2, y1, x1, y2, x2, y2], dim=1).reshape(-1, 4, 2)
    moved = placement.move_points(corners)
    around = torch.cat([moved.amin(1), moved.amax(1)], dim=1)
    return clip_boxes(around, placement.size).to(boxes.dtype)


def clip_boxes(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return boxes `(K, 4)` within an image of height and width `size`."""
    limit = boxes.new_tensor([size[1], size[0], size[1], size[0]])
    return torch.minimum(boxes.clamp(min=0), limit)


def find_kept_boxes(boxes: Tensor, smallest: float) -> Tensor:
    """Return which boxes have no side that is empty or shorter than `smallest`, bool `(K,)`."""
    sides = boxes[:, 2:] - boxes[:, :2]
    kept: Tensor = (sides >= smallest).all(1) & (sides > 0).all(1)
    return kept


def place_keypoints(points: Tensor, placement: Placement, kind: FieldKind) -> Tensor:
    """Return key points `(..., 3)`; those outside of the result, or not visible before, are 0."""
    if kind.mirror and placement.is_mirrored:
        points = points[..., list(kind.mirror), :]
    moved = placement.move_points(points[..., :2]).to(points.dtype)
    return hide_points(moved, points[..., 2:], placement.size)


def hide_points(points: Tensor, visibility: Tensor, size: tuple[int, int]) -> Tensor:
    """Return key points `(..., 3)` of places `(..., 2)` and visibilities `(..., 1)`, 0 for those
    outside of an image of height and width `size` and those that were not visible."""
    limit = points.new_tensor([size[1], size[0]])
    inside = ((points >= 0) & (points < limit)).all(-1, keepdim=True) & (visibility > 0)
    placed = torch.cat([points, visibility], dim=-1)
    return torch.where(inside, placed, torch.zeros_like(placed))


def select_rows(value: Any, kept: Tensor) -> Any:
    """Return the rows of a tensor or the entries of a list that are kept."""
    if isinstance(value, Tensor):
        return value[kept]
    return [row for row, stays in zip(value, kept.tolist(), strict=True) if stays]
