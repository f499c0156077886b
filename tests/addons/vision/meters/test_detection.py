"""Mean average precision as COCO's own code computes it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phasetrain.addons.vision.meters import detection
from phasetrain.addons.vision.meters.detection import MeanAveragePrecision
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError, Problem
from phasetrain.meters import Meter
from phasetrain.tasks.metering import update_meters


def make_boxes(count: int, generator: torch.Generator) -> Tensor:
    corner = torch.rand(count, 2, generator=generator) * 50
    return torch.cat([corner, corner + 5 + 30 * torch.rand(count, 2, generator=generator)], 1)


def make_images() -> tuple[list[Any], list[Any]]:
    """Return predictions with equal scores among them, and targets, for 40 images."""
    generator = torch.Generator().manual_seed(0)
    found = []
    true = []
    for _ in range(40):
        count = int(torch.randint(0, 5, (), generator=generator))
        boxes = make_boxes(count, generator)
        labels = torch.randint(0, 3, (count,), generator=generator)
        true.append({"boxes": boxes, "labels": labels})
        more = int(torch.randint(0, 4, (), generator=generator))
        moved = boxes + torch.randn(count, 4, generator=generator) * 2
        found.append(
            {
                "boxes": torch.cat([moved, make_boxes(more, generator)]),
                "labels": torch.cat([labels, torch.randint(0, 3, (more,), generator=generator)]),
                "scores": (torch.rand(count + more, generator=generator) * 8).round() / 8,
            }
        )
    return found, true


FOUND, TRUE = make_images()


def update(meter: Meter, ids: list[int], mask: Tensor | None = None, target: Any = None) -> Meter:
    found = [FOUND[at] for at in ids]
    true = [TRUE[at] for at in ids] if target is None else target
    numbers = torch.tensor(ids)
    if mask is not None and not mask.any():
        numbers = numbers[:0]
    meter.update(StepOutput(torch.tensor(0.0), 1.0, len(ids), found, true, mask, numbers))
    return meter


@pytest.mark.feature("meters.dense")
def test_values_are_those_of_pycocotools() -> None:
    found = update(MeanAveragePrecision(per_class=True), list(range(40))).compute()
    assert isinstance(found, dict)
    # COCOeval of pycocotools 2.0.11 for the same boxes.
    expected = {
        "mean": 0.19837602404186416,
        "at_50": 0.4578752611789609,
        "at_75": 0.11623079514113747,
        "of_0": 0.15985716218680687,
        "of_1": 0.24198128604069202,
        "of_2": 0.1932896238980936,
    }
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.feature("meters.dense")
def test_order_of_steps_and_ranks_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = update(MeanAveragePrecision(), list(range(40))).compute()
    ranks = [update(MeanAveragePrecision(), list(range(rank, 40, 3))) for rank in (2, 0, 1)]
    merged = MeanAveragePrecision()
    merged.merge_buffers([dict(one.named_buffers()) for one in ranks])
    assert merged.compute() == whole
    # Among equal scores the first box counts, so this holds for sorted images only.
    monkeypatch.setattr(detection, "_sort_by_image", lambda rows: rows.numpy())
    assert merged.compute() != whole


def test_padding_batches_do_not_count() -> None:
    meter = update(MeanAveragePrecision(), [0, 1])
    before = meter.compute()
    update(meter, [2, 3], torch.tensor([False, False]))
    assert meter.compute() == before


def pad_targets(mask: str) -> dict[str, Tensor]:
    """Return the targets of all images as the collate function `pad` makes them."""
    most = max(len(one["labels"]) for one in TRUE)
    boxes = torch.zeros(40, most, 4)
    labels = torch.full((40, most), -100)
    real = torch.zeros(40, most, dtype=torch.bool)
    for at, one in enumerate(TRUE):
        count = len(one["labels"])
        boxes[at, :count] = one["boxes"]
        labels[at, :count] = one["labels"]
        real[at, :count] = True
    return {"boxes": boxes, "labels": labels, mask: real}


@pytest.mark.parametrize("mask", ["mask", "real"])
def test_padded_targets_have_the_values_of_lists(mask: str) -> None:
    ids = list(range(40))
    found = update(MeanAveragePrecision(mask=mask), ids, target=pad_targets(mask)).compute()
    assert found == update(MeanAveragePrecision(), ids).compute()


class TestMask:
    """The padding of targets never counts as boxes."""

    def error(self, meter: MeanAveragePrecision, target: Any) -> Problem:
        out = StepOutput(torch.tensor(0.0), 1.0, 40, FOUND, target, None, torch.arange(40))
        with pytest.raises(ConfigError) as caught:
            update_meters({"map": meter}, {}, out)
        return caught.value.problems[0]

    @pytest.mark.parametrize("field", [None, torch.zeros(40, 8, 8, dtype=torch.int64)])
    def test_mask_of_another_name_is_rejected(self, field: Tensor | None) -> None:
        target = pad_targets("real") | ({} if field is None else {"mask": field})
        found = self.error(MeanAveragePrecision(), target)
        assert (found.code, found.key) == ("config.wrong_value", "METERS.map.mask")
        assert (found.given, found.suggestion) == ("'mask'", "real")

    @pytest.mark.parametrize("mask", ["mask", None])
    def test_negative_labels_without_a_mask_are_rejected(self, mask: str | None) -> None:
        target = pad_targets("mask")
        del target["mask"]
        found = self.error(MeanAveragePrecision(mask=mask), target)
        assert (found.code, found.key) == ("data.label_outside_classes", "METERS.map.mask")
        assert found.given == repr(mask)

    def test_other_errors_of_meters_are_named_by_their_label(self) -> None:
        class Strict(MeanAveragePrecision):
            def update(self, out: StepOutput) -> None:
                raise ConfigError("no boxes today", code="mine")

        found = self.error(Strict(), pad_targets("mask"))
        assert (found.code, found.key, found.expected) == ("mine", "METERS.map", "no boxes today")

    def test_other_masks_are_accepted_if_no_box_is_padding(self) -> None:
        count = 2
        boxes = make_boxes(6, torch.Generator().manual_seed(1)).reshape(3, count, 4)
        labels = torch.zeros(3, count, dtype=torch.int64)
        true = {"boxes": boxes, "labels": labels, "crowd": torch.zeros(3, count, dtype=torch.bool)}
        found = true | {"scores": torch.ones(3, count)}
        meter = MeanAveragePrecision(mask=None)
        meter.update(StepOutput(torch.tensor(0.0), 1.0, 3, found, true, None, torch.arange(3)))
        assert meter.compute() == {"mean": 1.0, "at_50": 1.0, "at_75": 1.0}


def test_mappings_of_lists_have_the_values_of_lists() -> None:
    ids = list(range(40))
    lists = {name: [one[name] for one in TRUE] for name in ("boxes", "labels")}
    # The mask is that of other, padded fields.
    target = {**lists, "mask": torch.zeros(40, 2, dtype=torch.bool)}
    found = update(MeanAveragePrecision(), ids, target=target).compute()
    assert found == update(MeanAveragePrecision(), ids).compute()


def test_one_right_box_of_two_is_half() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    labels = torch.tensor([1, 1])
    meter = MeanAveragePrecision(class_names=("sky", "dog"))
    found = [{"boxes": boxes[:1], "labels": labels[:1], "scores": torch.tensor([0.9])}]
    true = [{"boxes": boxes, "labels": labels}]
    meter.update(StepOutput(torch.tensor(0.0), 1.0, 1, found, true, None, torch.tensor([5])))
    # The recalls 0, 0.01, ..., 0.5 are reached with precision 1: 51 of 101.
    assert meter.compute() == pytest.approx(dict.fromkeys(("mean", "at_50", "at_75"), 51 / 101))
    assert meter.table()["dog"]["boxes"] == 2


def test_other_outputs_are_rejected() -> None:
    with pytest.raises(ValueError, match="outputs with boxes"):
        MeanAveragePrecision().update(
            StepOutput(torch.tensor(0.0), 1.0, 1, torch.zeros(1, 4), TRUE[:1], None, torch.zeros(1))
        )
