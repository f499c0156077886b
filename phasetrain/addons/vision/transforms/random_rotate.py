"""Random rotation."""

import math

from phasetrain.config.checks import check_at_least, check_positive
from phasetrain.data.transforms.base import TRANSFORMS, Keys
from phasetrain.data.transforms.joint.geometric import (
    GeometricTransform,
    Interpolation,
    check_interpolation,
)
from phasetrain.data.transforms.joint.placement import Placement


@TRANSFORMS.register("random_rotate")
class RandomRotate(GeometricTransform):
    """Rotates each image `(C, H, W)` around its center by a random angle; the size stays, and
    pixels from outside of the image are 0.

    Args:
        degrees: largest angle, in degrees; each angle in [-degrees, degrees] is equally likely.
        step: angles are multiples of it, in degrees, such as 90 for quarter turns; None: any angle.
        interpolation: `bilinear` or `nearest`.

    Raises:
        ValueError: a negative angle, a step that is not positive or another interpolation.
    """

    any_size = True

    def __init__(
        self,
        degrees: float,
        step: float | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        check_at_least(0, degrees=degrees)
        if step is not None:
            check_positive(step=step)
        check_interpolation(interpolation)
        self.degrees = degrees
        self.step = step
        self.interpolation = interpolation

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        """Return the rotation of an image of `size`."""
        if self.step is None:
            angle = float(key.uniform()[0] * 2 - 1) * self.degrees
        else:
            most = math.floor(self.degrees / self.step)
            angle = int(key.integers(-most, most + 1)[0]) * self.step
        cos = math.cos(math.radians(angle))
        sin = math.sin(math.radians(angle))
        if angle % 90 == 0:
            # cos(pi / 2) is 6e-17, which would move pixels whose place lies on an edge.
            cos = round(cos)
            sin = round(sin)
        y = size[0] / 2
        x = size[1] / 2
        offset = (x - cos * x + sin * y, y - sin * x - cos * y)
        return Placement(((cos, -sin), (sin, cos)), offset, size)
