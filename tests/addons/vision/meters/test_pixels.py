"""Mean IoU, Dice score and pixel accuracy count pixels, whatever the steps and ranks."""

import math
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.addons.vision.meters.pixels import Dice, MeanIoU, PixelAccuracy
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS, Meter

TRUE = torch.tensor([[[0, 0], [1, 1]], [[2, -100], [1, 0]]])
PREDICTED = torch.tensor([[[0, 1], [1, 1]], [[0, 1], [1, 0]]])


def score(predicted: Tensor, classes: int = 4) -> Tensor:
    """Return scores `(N, C, H, W)` whose highest ones are some classes."""
    return torch.nn.functional.one_hot(predicted, classes).movedim(-1, 1).float()


def update(meter: Meter, output: Any, target: Any, mask: Tensor | None = None) -> Meter:
    meter.update(StepOutput(torch.tensor(0.0), 1.0, len(target), output, target, mask))
    return meter


# Counted by hand, 7 pixels: class 0 has hits 2, true 3, predicted 3; class 1 has 3, 3, 4; class 2
# has 0, 1, 0; class 3 does not occur.
@pytest.mark.feature(
    "meters.dense",
    "mean IoU, Dice score, pixel accuracy and COCO's mean average precision, whatever the "
    "order of steps and ranks",
    "`METERS.mean_iou`, `dice`, `pixel_accuracy`, `mean_average_precision`",
)
@pytest.mark.parametrize(("kind", "of_0", "of_1"), [(MeanIoU, 2 / 4, 3 / 4), (Dice, 4 / 6, 6 / 7)])
def test_overlap_has_the_values_counted_by_hand(kind: Any, of_0: float, of_1: float) -> None:
    found = update(kind(4, class_names=("sky", "dog", "cat", "cow")), score(PREDICTED), TRUE)
    values = found.compute()
    assert isinstance(values, dict)
    assert list(values) == ["mean", "absent", "of_sky", "of_dog", "of_cat", "of_cow"]
    assert values["of_sky"] == pytest.approx(of_0, abs=1e-12)
    assert values["of_dog"] == pytest.approx(of_1, abs=1e-12)
    assert values["of_cat"] == 0
    assert math.isnan(values["of_cow"])
    assert values["absent"] == 1
    assert values["mean"] == pytest.approx((of_0 + of_1) / 3, abs=1e-12)
    assert found.table()["dog"]["pixels"] == 3


def test_pixel_accuracy_leaves_out_ignored_pixels() -> None:
    assert update(PixelAccuracy(4), score(PREDICTED), TRUE).compute() == pytest.approx(5 / 7)
    counted = TRUE.masked_fill(TRUE == -100, 1)
    meter = PixelAccuracy(4, ignore_index=2)
    assert update(meter, score(PREDICTED), counted).compute() == pytest.approx(6 / 7)


@pytest.mark.parametrize("kind", [MeanIoU, Dice, PixelAccuracy])
def test_masked_samples_do_not_count(kind: Any) -> None:
    alone = update(kind(4), score(PREDICTED[:1]), TRUE[:1])
    masked = update(kind(4), score(PREDICTED), TRUE, torch.tensor([True, False]))
    assert torch.equal(alone.get_buffer("counts"), masked.get_buffer("counts"))
    padding = update(kind(4), score(PREDICTED), TRUE, torch.tensor([False, False]))
    assert padding.is_empty


@pytest.mark.feature("meters.dense")
@pytest.mark.parametrize("kind", [MeanIoU, Dice, PixelAccuracy])
def test_merged_ranks_have_the_counts_of_one_process(kind: Any) -> None:
    whole = update(kind(4), score(PREDICTED), TRUE)
    ranks = [update(kind(4), score(PREDICTED[at : at + 1]), TRUE[at : at + 1]) for at in (1, 0)]
    merged = kind(4)
    merged.merge_buffers([dict(one.named_buffers()) for one in ranks])
    assert torch.equal(merged.get_buffer("counts"), whole.get_buffer("counts"))


def test_class_outside_is_an_error_at_the_end() -> None:
    meter = update(MeanIoU(2), score(PREDICTED, 2), TRUE)
    with raises(ConfigError, code="data.label_outside_classes"):
        meter.compute()


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(2, 4, 3, 3), torch.zeros(2, 2, 2, dtype=torch.int64)),
        (torch.zeros(2, 4, 2, 2), torch.zeros(2, 2, 2)),
        (torch.zeros(2, 3, 2, 2), torch.zeros(2, 2, 2, dtype=torch.int64)),
        ([torch.zeros(4, 2, 2)], torch.zeros(1, 2, 2, dtype=torch.int64)),
    ],
)
def test_wrong_forms_are_rejected(output: Any, target: Tensor) -> None:
    with pytest.raises(ValueError, match="mean_iou"):
        update(METERS.build("mean_iou", {"classes": 4}), output, target)
