"""Meters of segmentation: mean intersection over union, Dice score and pixel accuracy."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import IGNORED, StepOutput
from phasetrain.meters.base import METERS
from phasetrain.meters.class_scores import (
    ClassMeter,
    average_present,
    check_classes,
    find_outside,
    label_classes,
    make_class_labels,
)


class PixelMeter(ClassMeter):
    """Counts which class is predicted for pixels of which class, over all images of a phase.

    Takes scores `(N, C, ...)`, whose highest one is the prediction, and classes `(N, ...)`. The
    counts are integers, so that the order of steps and ranks does not matter.

    Args:
        name: name of the meter, for messages.
        classes: number of classes.
        ignore_index: class of pixels that do not count; None: all count.
        class_names: names of the classes.

    Raises:
        ValueError: there are no classes; on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    better = "larger"

    counts: Tensor

    def __init__(
        self,
        name: str,
        classes: int,
        ignore_index: int | None,
        class_names: Sequence[str] | None,
    ) -> None:
        super().__init__(name, ignore_index)
        check_at_least(1, classes=classes)
        self.classes = classes
        self.names = make_class_labels(classes, class_names)
        self.add_sum("counts", (classes, classes), dtype=torch.int64)

    def update(self, out: StepOutput) -> None:
        """Count the pixels of one step."""
        self._check_shapes(out.output, out.target)
        target = out.target.long()  # in uint8, -100 would be 156, and the product below overflow
        predicted = out.output.detach().argmax(1)
        counted = self.find_counted(target, out.mask)
        invalid = find_outside(target, self.classes)
        self.count_outside(invalid, counted)
        # Clamped, since an index outside would fail on the device; these pixels are added as 0.
        pairs = target.clamp(0, self.classes - 1) * self.classes + predicted
        # Not bincount, which waits for the device to learn the length of its result.
        self.counts.view(-1).index_add_(0, pairs.flatten(), (counted & ~invalid).flatten().long())

    @abstractmethod
    def compute(self) -> float | dict[str, float]:
        """Return the metric of all pixels, NaN without any."""

    def count_pixels(self) -> Tensor:
        """Return the counts as float64, row: class, column: prediction.

        Raises:
            ConfigError: a target was outside the classes.
        """
        self.check_outside(self.classes)
        return self.counts.double()

    def _check_shapes(self, output: object, target: object) -> None:
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                f"{self.name} takes tensors of scores and classes, not {type(output).__name__} and "
                f"{type(target).__name__}"
            )
        fits = output.ndim >= 2 and (len(output), *output.shape[2:]) == tuple(target.shape)
        if not fits or target.is_floating_point():
            raise ValueError(
                f"{self.name} takes scores (N, C, H, W) and integer classes (N, H, W), not outputs "
                f"{tuple(output.shape)} and targets {target.dtype} {tuple(target.shape)}"
            )
        check_classes(self.name, output.shape[1], self.classes)


class ClassOverlap(PixelMeter):
    """The overlap of predicted and true pixels of each class, and its mean over classes.

    Metrics: `mean` over the classes that occur in targets or predictions, `absent`, the number of
    the others, and `of_NAME`.
    """

    first = "mean"
    name: str

    def __init__(
        self,
        classes: int,
        ignore_index: int | None = IGNORED,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(self.name, classes, ignore_index, class_names)

    @abstractmethod
    def divide(self, hits: Tensor, true: Tensor, predicted: Tensor) -> Tensor:
        """Return the overlap of each class from numbers of pixels, `(C,)` each."""

    def compute(self) -> dict[str, float]:
        """Return the mean, the number of absent classes, and the overlap of each class."""
        values, present = self._compute_classes()
        return average_present(values, present) | label_classes(self.names, values)

    def table(self) -> dict[str, dict[str, float]]:
        """Return overlap and pixels of each class."""
        values, _ = self._compute_classes()
        pixels = self.counts.sum(1).tolist()
        return {
            name: {self.name: value, "pixels": float(count)}
            for name, value, count in zip(self.names, values.tolist(), pixels, strict=True)
        }

    def _compute_classes(self) -> tuple[Tensor, Tensor]:
        """Return the overlap of each class, and whether it occurs, `(C,)` each."""
        counts = self.count_pixels()
        true = counts.sum(1)
        predicted = counts.sum(0)
        return self.divide(counts.diagonal(), true, predicted), true + predicted > 0


@METERS.register("mean_iou")
class MeanIoU(ClassOverlap):
    """Mean intersection over union of the classes, over all pixels of a phase (mIoU).

    Takes scores `(N, C, H, W)` and classes `(N, H, W)`. Metrics: `mean` over the classes that occur
    in targets or predictions, `absent`, the number of the others, and `of_NAME`.

    Args:
        classes: number of classes; by default the number in the data.
        ignore_index: class of pixels that do not count; null: all count. By default the one of the
            loss, or -100 if it has none.
        class_names: names of the classes; by default the names in the data.

    Raises:
        ValueError: there are no classes; on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    name = "mean_iou"

    def divide(self, hits: Tensor, true: Tensor, predicted: Tensor) -> Tensor:
        """Return intersection over union of each class, NaN if it is absent."""
        return hits / (true + predicted - hits)


@METERS.register("dice")
class Dice(ClassOverlap):
    """Mean Dice score of the classes, over all pixels of a phase: 2 * hits / (true + predicted).

    Takes scores `(N, C, H, W)` and classes `(N, H, W)`. Metrics: `mean` over the classes that occur
    in targets or predictions, `absent`, the number of the others, and `of_NAME`.

    Args:
        classes: number of classes; by default the number in the data.
        ignore_index: class of pixels that do not count; null: all count. By default the one of the
            loss, or -100 if it has none.
        class_names: names of the classes; by default the names in the data.

    Raises:
        ValueError: there are no classes; on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    name = "dice"

    def divide(self, hits: Tensor, true: Tensor, predicted: Tensor) -> Tensor:
        """Return the Dice score of each class, NaN if it is absent."""
        return 2 * hits / (true + predicted)


@METERS.register("pixel_accuracy")
class PixelAccuracy(PixelMeter):
    """Fraction, in [0, 1], of the pixels of a phase whose class has the highest score.

    Takes scores `(N, C, H, W)` and classes `(N, H, W)`.

    Args:
        classes: number of classes; by default the number in the data.
        ignore_index: class of pixels that do not count; null: all count. By default the one of the
            loss, or -100 if it has none.

    Raises:
        ValueError: there are no classes; on update: wrong shapes.
        ConfigError: on compute: a target is outside the classes.
    """

    def __init__(self, classes: int, ignore_index: int | None = IGNORED) -> None:
        super().__init__("pixel_accuracy", classes, ignore_index, None)

    def compute(self) -> float:
        """Return the accuracy, NaN without pixels."""
        counts = self.count_pixels()
        return float(counts.diagonal().sum() / counts.sum())
