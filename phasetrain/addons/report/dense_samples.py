"""Samples of a test of segmentation or detection, for the hook `report`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phasetrain.addons.report.images import (
    Array,
    blend_classes,
    make_data_url,
    normalize_pixels,
    resize_nearest,
)
from phasetrain.config.addons import find_service
from phasetrain.engine.batch import Batch, StepOutput

MAX_BOXES = 20
"""Number of predicted boxes that are kept per image, the ones with the highest scores."""

DenseKind = Literal["masks", "boxes"]
Boxes = Mapping[str, Tensor]
"""Boxes `(K, 4)` of an image, with `labels` `(K,)` and for predictions `scores` `(K,)`."""


def find_dense_kind(out: StepOutput) -> DenseKind | None:
    """Return the kind of prediction of a model of segmentation or detection; None for other models,
    and for boxes without the add-on vision."""
    output = out.output
    target = out.target
    if isinstance(output, Tensor) and isinstance(target, Tensor):
        fits = output.ndim == 4 and (len(output), *output.shape[2:]) == tuple(target.shape)
        if fits and output.shape[1] > 1 and not target.is_floating_point():
            return "masks"
    elif _has_boxes(output, ("boxes", "labels", "scores")) and _has_boxes(
        target, ("boxes", "labels")
    ):
        return "boxes" if find_service("split_boxes") else None
    return None


def select_dense_samples(
    kind: DenseKind, batch: Batch, out: StepOutput, count: int, pixels: int
) -> list[dict[str, Any]]:
    """Return `count` samples of a batch, evenly spaced, with their targets and predictions.

    Args:
        kind: result of `find_dense_kind`.
        batch: the batch.
        out: its output, with the target.
        count: number of samples.
        pixels: longer side of the images.

    Raises:
        ValueError: targets or predictions have another form.
    """
    is_counted = torch.ones(len(batch.ids), dtype=torch.bool)
    if batch.mask is not None:
        is_counted = batch.mask.cpu()
    places = select_evenly(is_counted.nonzero()[:, 0].tolist(), count)
    if kind == "masks":
        return [_describe_masks(batch, out, index, pixels) for index in places]
    split_boxes = find_service("split_boxes")
    predicted = split_boxes(out.output, "mask", "outputs")
    true = split_boxes(out.target, "mask", "targets")
    return [
        _describe_boxes(batch, predicted[index], true[index], index, pixels) for index in places
    ]


def select_evenly(places: Sequence[int], count: int) -> list[int]:
    """Return at most `count` places, evenly spaced."""
    count = min(count, len(places))
    return [places[number * len(places) // count] for number in range(count)]


def encode_image(inputs: Any, index: int, pixels: int) -> str | None:
    """Return the image of a sample as a data URL; None if the inputs are not images."""
    shown = _normalize_image(find_image(inputs, index), pixels)
    if shown is None:
        return None
    return make_data_url(shown)


def find_image(inputs: Any, index: int) -> Array | None:
    """Return the image `(C, H, W)` or `(H, W)` of a sample; None if the inputs are not images."""
    if isinstance(inputs, Mapping):
        tensors = (
            value for value in inputs.values() if isinstance(value, Tensor) and value.ndim == 4
        )
        inputs = next(tensors, None)
    is_image = isinstance(inputs, Tensor) and inputs.ndim in (3, 4)
    if isinstance(inputs, list) and isinstance(inputs[index], Tensor):
        is_image = inputs[index].ndim in (2, 3)
    if not is_image or inputs[index].is_complex():
        return None
    image: Array = inputs[index].detach().float().cpu().numpy()
    return image


def _normalize_image(image: Array | None, pixels: int) -> Array | None:
    if image is None:
        return None
    return normalize_pixels(image, pixels)


def _has_boxes(value: Any, names: Sequence[str]) -> bool:
    if isinstance(value, Mapping):
        return all(name in value for name in names)
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(
        isinstance(boxes, Mapping) and set(names) <= boxes.keys() for boxes in value
    )


def _describe_masks(batch: Batch, out: StepOutput, index: int, pixels: int) -> dict[str, Any]:
    true = out.target[index].detach().cpu().numpy()
    predicted = out.output[index].detach().argmax(0).cpu().numpy()
    is_counted = (true >= 0) & (true < out.output.shape[1])
    shown = _normalize_image(find_image(batch.input, index), pixels)
    if shown is None:  # such as one of 4 channels
        shown = normalize_pixels(np.zeros(true.shape), pixels)
    if shown is None:
        raise ValueError(f"masks {tuple(true.shape)} are too small for an image")
    size = shown.shape[:2]
    right = None
    if is_counted.any():
        right = round(float((true == predicted)[is_counted].mean()), 4)
    target = resize_nearest(np.where(is_counted, true, -1), size)
    prediction = resize_nearest(predicted, size)
    return {
        "index": _find_index(batch, index),
        "image": make_data_url(shown),
        "target": make_data_url(blend_classes(shown, target)),
        "prediction": make_data_url(blend_classes(shown, prediction)),
        "right": right,
        "classes": np.union1d(target[target >= 0], prediction).tolist(),
    }


def _describe_boxes(
    batch: Batch, predicted: Boxes, true: Boxes, index: int, pixels: int
) -> dict[str, Any]:
    image = find_image(batch.input, index)
    shown = _normalize_image(image, pixels)
    content: dict[str, Any] = {"index": _find_index(batch, index)}
    if image is not None and shown is not None:
        # Coordinates of boxes are those of the input, which may be larger than what is shown.
        height, width = image.shape[-2:]
        if image.shape[-1] == 3 and image.shape[0] not in (1, 3):  # channels last
            height, width = image.shape[:2]
        content |= {"image": make_data_url(shown), "size": [width, height]}
    order = predicted["scores"].detach().argsort(descending=True, stable=True)[:MAX_BOXES]
    return content | {
        "target": _list_boxes(true),
        "prediction": _list_boxes({name: value[order] for name, value in predicted.items()}),
    }


def _list_boxes(boxes: Boxes) -> list[dict[str, Any]]:
    corners = boxes["boxes"].detach().float().reshape(-1, 4).tolist()
    listed: list[dict[str, Any]] = [
        {"class": int(label), "box": [round(value, 2) for value in box]}
        for box, label in zip(corners, boxes["labels"].tolist(), strict=True)
    ]
    if "scores" in boxes:
        for box, score in zip(listed, boxes["scores"].tolist(), strict=True):
            box["score"] = round(score, 4)
    # Targets that are padded, with a mask of another name, have negative labels.
    return [box for box in listed if box["class"] >= 0]


def _find_index(batch: Batch, index: int) -> int | None:
    if index < len(batch.ids):
        return int(batch.ids[index])
    return None
