"""Mean average precision of boxes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters.base import METERS, Meter
from phasetrain.meters.class_scores import make_class_labels

THRESHOLDS = np.round(np.arange(0.5, 1.0, 0.05), 2)
"""Overlaps from which a box is found, as COCO averages them."""

RECALLS = np.linspace(0, 1, 101)
"""Recalls at which COCO reads the precision."""

Rows = NDArray[np.float64]
Boxes = Mapping[str, Tensor]
"""Boxes `(K, 4)` of an image, with `labels` `(K,)` and for predictions `scores` `(K,)`."""


@METERS.register("mean_average_precision")
class MeanAveragePrecision(Meter):
    """Average precision of boxes as COCO defines it, over classes and overlaps (mAP).

    Takes a list with the boxes `(K, 4)`, scores `(K,)` and labels `(K,)` of each image, as the
    detectors of torchvision return it, and targets with boxes and labels: a list as well, a mapping
    of lists, or a mapping of padded tensors `(N, K, ...)` with the mask of real boxes. Boxes are
    x1, y1, x2, y2 in pixels. Metrics: `mean`, over overlaps from 0.5 to 0.95 and the classes that
    have boxes; `at_50` and `at_75`, at one overlap; with `per_class` also `of_NAME`. COCO's areas
    and crowds are not distinguished, and an image that a phase has twice counts as one image. Keeps
    56 bytes per box.

    Args:
        most: number of boxes per image that count, the ones with the highest scores.
        per_class: also return the value of each class.
        mask: name of the mask in targets that are padded; None: every box is real.
        class_names: names of the classes; by default the names in the data.

    Raises:
        ValueError: `most` is below 1; on update: another form of output or target.
        ConfigError: on update: padded targets have no mask of this name.
    """

    better = "larger"
    first = "mean"

    found: Tensor
    true: Tensor

    def __init__(
        self,
        most: int = 100,
        *,
        per_class: bool = False,
        mask: str | None = "mask",
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, most=most)
        self.most = most
        self.per_class = per_class
        self.mask = mask
        self.class_names = class_names
        # Columns: index of the image, class, score (0 in targets), and the box.
        self.add_rows("found", (7,), dtype=torch.float64)
        self.add_rows("true", (7,), dtype=torch.float64)

    def update(self, out: StepOutput) -> None:
        """Append the boxes of one step."""
        _check_mask(out.target, self.mask)
        predicted = split_boxes(out.output, self.mask, "outputs")
        true = split_boxes(out.target, self.mask, "targets")
        if len(predicted) != len(true) or out.ids is None:
            raise ValueError(
                f"mean_average_precision takes boxes of the same images, not of {len(predicted)} "
                f"and {len(true)}"
            )
        if not len(out.ids):
            return  # a padding batch, in which nothing counts
        counted = [True] * len(true) if out.mask is None else out.mask.tolist()
        for at, image in enumerate(out.ids.tolist()):
            if counted[at]:
                self.append_rows("found", _make_rows(image, predicted[at], self.most))
                self.append_rows("true", _make_rows(image, true[at], None))

    def compute(self) -> dict[str, float]:
        """Return the means over classes; NaN without boxes in the targets."""
        classes, values = self._compute_classes()
        nothing = float("nan")
        result = {
            "mean": float(values.mean()) if len(classes) else nothing,
            "at_50": float(values[:, 0].mean()) if len(classes) else nothing,
            "at_75": float(values[:, 5].mean()) if len(classes) else nothing,
        }
        if not self.per_class:
            return result
        names = self._name_classes(classes)
        return result | {
            f"of_{name}": float(row.mean()) for name, row in zip(names, values, strict=True)
        }

    def metric_names(self) -> tuple[str, ...] | None:
        """Return the names of the metrics; None with values per class, which depend on the data."""
        if self.per_class:
            return None
        return super().metric_names()

    def table(self) -> dict[str, dict[str, float]]:
        """Return precision and number of boxes of each class."""
        classes, values = self._compute_classes()
        labels = self.true[:, 1].cpu().numpy()
        return {
            name: {
                "mean": float(row.mean()),
                "at_50": float(row[0]),
                "at_75": float(row[5]),
                "boxes": float((labels == label).sum()),
            }
            for name, label, row in zip(self._name_classes(classes), classes, values, strict=True)
        }

    def _name_classes(self, classes: Sequence[int]) -> list[str]:
        count = max([*classes, -1]) + 1
        if self.class_names is not None:
            count = max(count, len(self.class_names))
        names = make_class_labels(count, self.class_names)
        return [names[label] for label in classes]

    def _compute_classes(self) -> tuple[list[int], Rows]:
        """Return the classes that have boxes, and their precision at each threshold, `(C, 10)`."""
        # By image: rows of ranks and of a resumed phase come in another order, and among equal
        # scores the first one counts.
        predicted = _sort_by_image(self.found)
        true = _sort_by_image(self.true)
        classes = [int(label) for label in np.unique(true[:, 1])]
        values = [
            _average_precision(predicted[predicted[:, 1] == label], true[true[:, 1] == label])
            for label in classes
        ]
        return classes, np.array(values).reshape(-1, len(THRESHOLDS))


def split_boxes(value: Any, mask: str | None, what: str) -> list[Boxes]:
    """Return the boxes of each image.

    Args:
        value: a list of mappings, or a mapping of lists or of padded tensors.
        mask: name of the mask of real boxes in a mapping of padded tensors; None without.
        what: name of the value, for messages.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, Mapping) and isinstance(value.get("boxes"), Tensor | list):
        names = [name for name in ("boxes", "labels", "scores") if name in value]
        # Without a mask every image has the same number of boxes. Lists are not padded, so a mask
        # next to them is that of other fields.
        real = None
        if isinstance(value["boxes"], Tensor) and mask is not None:
            real = value.get(mask)
        return [
            {name: value[name][at] if real is None else value[name][at][real[at]] for name in names}
            for at in range(len(value["boxes"]))
        ]
    is_list = isinstance(value, list | tuple)
    if is_list and all(isinstance(entry, Mapping) and "boxes" in entry for entry in value):
        return list(value)
    raise ValueError(
        f"mean_average_precision takes {what} with boxes and labels, as a list of mappings or a "
        f"mapping of lists or padded tensors, not {type(value).__name__}"
    )


def _check_mask(target: Any, mask: str | None) -> None:
    """Reject padded targets whose padding would count as boxes, since no mask marks it.

    Raises:
        ConfigError: the name of the mask is wrong, or labels are negative without a mask.
    """
    if not isinstance(target, Mapping):
        return
    labels = target.get("labels")
    if not isinstance(target.get("boxes"), Tensor) or not isinstance(labels, Tensor):
        return
    entry = target.get(mask) if mask is not None else None
    if _is_mask(entry, labels):
        return
    others = [str(name) for name, value in target.items() if _is_mask(value, labels)]
    if mask is not None and (entry is not None or others):
        form = "there is no such entry in the targets"
        if entry is not None:
            form = f"this entry of the targets is not a mask of boxes, bool {tuple(labels.shape)}"
        near = f"; did you mean {others[0]!r}?" if others else ";"
        raise ConfigError(
            f"mask = {mask!r}: {form}{near} expected the name that DATA.*.collate gives the mask, "
            "or null if no box is padding",
            code="config.wrong_value",
        )
    if labels.numel() and bool((labels < 0).any()):
        raise ConfigError(
            f"mask = {mask!r}: the targets have the label {labels.min():g} and no mask, so padding "
            "would count as boxes; expected the mask that `collate: {name: pad, fields: [boxes, "
            "labels]}` adds, under this name",
            code="data.label_outside_classes",
        )


def _is_mask(value: Any, labels: Tensor) -> bool:
    """Return whether a value is bool `(N, K)`, an entry per label."""
    return (
        isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == labels.shape[:2]
    )


def _make_rows(image: int, boxes: Boxes, most: int | None) -> Tensor:
    corners = boxes["boxes"].detach().double().reshape(-1, 4)
    count = len(corners)
    scores = corners.new_zeros(count)
    if most is not None:
        scores = boxes["scores"].detach().double()
    labels = boxes["labels"].detach().double()
    rows = torch.cat(
        [corners.new_full((count, 1), image), labels[:, None], scores[:, None], corners], dim=1
    )
    if most is None or count <= most:
        return rows
    return rows[scores.argsort(descending=True, stable=True)[:most]]


def _sort_by_image(rows: Tensor) -> Rows:
    array: Rows = rows.cpu().numpy()
    return array[np.argsort(array[:, 0], kind="stable")]


def _average_precision(predicted: Rows, true: Rows) -> Rows:
    """Return the average precision of one class at each threshold, `(10,)`."""
    order = np.argsort(-predicted[:, 2], kind="stable")
    predicted = predicted[order]
    hits = _match_boxes(predicted, true)
    counts = np.arange(1, len(predicted) + 1)
    values = np.zeros(len(THRESHOLDS))
    for at, row in enumerate(hits):
        right = row.cumsum()
        recall = right / len(true)
        # The highest precision at this recall or a larger one.
        precision = np.maximum.accumulate((right / counts)[::-1])[::-1]
        indices = np.searchsorted(recall, RECALLS, side="left")
        inside = indices < len(precision)
        values[at] = precision[indices[inside]].sum() / len(RECALLS)
    return values


def _match_boxes(predicted: Rows, true: Rows) -> NDArray[np.bool_]:
    """Return at each threshold whether a predicted box has found a true one, `(10, K)`."""
    hits = np.zeros((len(THRESHOLDS), len(predicted)), dtype=bool)
    taken = np.zeros((len(THRESHOLDS), len(true)), dtype=bool)
    rows = {image: np.flatnonzero(true[:, 0] == image) for image in np.unique(true[:, 0])}
    for number, box in enumerate(predicted):
        candidates = rows.get(box[0])
        if candidates is None:
            continue
        overlaps = _overlap(box[3:], true[candidates, 3:])
        if overlaps.max() < THRESHOLDS[0]:
            continue  # most boxes, which saves most of the time
        for at, threshold in enumerate(THRESHOLDS):
            free = np.where(taken[at, candidates], -1.0, overlaps)
            # The last of equal overlaps, as in COCO's own code.
            best = len(free) - 1 - int(free[::-1].argmax())
            if free[best] >= threshold:
                taken[at, candidates[best]] = True
                hits[at, number] = True
    return hits


def _overlap(box: Rows, others: Rows) -> Rows:
    """Return intersection over union of a box `(4,)` with others `(K, 4)`."""
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[2:], others[:, 2:])
    common = np.prod(np.clip(high - low, 0, None), axis=1)
    areas = np.prod(others[:, 2:] - others[:, :2], axis=1) + np.prod(box[2:] - box[:2])
    ratios: Rows = common / (areas - common)
    return ratios
