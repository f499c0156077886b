"""VISSL's image transforms as entries of `DATA.*.transforms`."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from phasetrain.addons.vissl.draft import ExperimentDraft

Item = dict[str, Any]
View = list[Item]
"""The transforms of one view of an image."""

SAME = {
    name: f"torchvision.{name}"
    for name in (
        "Resize",
        "RandomCrop",
        "ColorJitter",
        "RandomGrayscale",
        "RandomErasing",
        "RandomRotation",
        "RandomVerticalFlip",
        "Pad",
        "RandomAffine",
        "RandomPerspective",
        "Grayscale",
        "FiveCrop",
    )
}
"""Transforms of torchvision, whose parameters stay."""

MNIST_SIZE = 28
"""Side of an image of MNIST, in pixels."""

NEEDLESS = {
    "ToTensor": "images are tensors",
    "ImgPilToTensor": "images are tensors",
}

GAPS = {
    "MaskedImageModeling": "masked image modelling",
    "ImgPatchesFromTensor": "patches of an image as inputs, and heads on all of them",
    "ShuffleImgPatches": "patches of an image as inputs, and heads on all of them",
    "ImgPilToPatchesAndImage": "patches of an image as inputs, and heads on all of them",
    "ImgPil2LabTensor": "images in the colour space Lab",
    "ImgPilRandomPhotometric": "posterized, sharpened, solarized images with maximal contrast",
}


class TransformConverter:
    """Converts the transforms of a split.

    Args:
        draft: takes gaps and differences.
        key: key of the list, such as DATA.TRAIN.TRANSFORMS.
    """

    def __init__(self, draft: ExperimentDraft, key: str) -> None:
        self.draft = draft
        self.key = key
        self.gaps: list[str] = []

    def convert(self, items: Sequence[Mapping[str, Any]]) -> tuple[View, list[View]]:
        """Return the transforms of the image and of each view; no views: one image.

        Gaps are recorded under the key of the list.
        """
        common: View = []
        views: list[View] = []
        for item in items:
            params = dict(item)
            name = str(params.pop("name"))
            # Transforms before the replication run once per sample, those after it in each view.
            made = self._make_views(name, params, views)
            if made is not None:
                views = made
                continue
            converted = self._convert_one(name, params)
            if views:
                views = [[*view, *converted] for view in views]
            else:
                common += converted
        if self.gaps:
            reason = f"{'; '.join(dict.fromkeys(self.gaps))}: no counterpart"
            self.draft.miss(reason, self.key)
        return common, views

    def _make_views(
        self, name: str, params: dict[str, Any], views: list[View]
    ) -> list[View] | None:
        """Return the views after a transform that makes or tells apart views; None: it does not."""
        if name == "ImgReplicatePil":
            return [[] for _ in range(params.get("num_times", 2))]
        if name == "ImgPilToMultiCrop":
            made: list[View] = []
            sizes = zip(
                params["num_crops"], params["size_crops"], params["crop_scales"], strict=True
            )
            for count, size, scale in sizes:
                crop = {"name": "random_resized_crop", "size": size, "scale": list(scale)}
                # Views of one size are equal, so that `group_views` makes one group of them.
                made += [[crop]] * count
            return made
        if name == "ImgPilMultiCropRandomApply":
            inner = [
                transform for item in params["transforms"] for transform in self._convert_item(item)
            ]
            pairs = zip(views, params["prob"], strict=True)
            return [view + _apply(inner, chance) for view, chance in pairs]
        return None

    def _convert_item(self, item: Mapping[str, Any]) -> View:
        params = dict(item)
        return self._convert_one(str(params.pop("name")), params)

    def _convert_one(self, name: str, params: dict[str, Any]) -> View:
        if name in NEEDLESS:
            return []
        if name in SAME:
            return [{"name": SAME[name], **params}]
        if name in CONVERTERS:
            converted, unknown = CONVERTERS[name](params)
            self.gaps += [f"{name}.{key}" for key in unknown]
            return converted
        self.gaps.append(f"{name} ({GAPS.get(name, 'unknown transform')})")
        return []


def group_views(views: Sequence[View]) -> Item:
    """Return the transform `multi_crop` of views, in which equal neighbours are one group."""
    groups = [{"views": len(list(same)), "transforms": list(view)} for view, same in groupby(views)]
    return {"name": "multi_crop", "groups": groups}


def image_size(items: Sequence[Item]) -> int | None:
    """Return the side in pixels after transforms; None: they keep it."""
    # Resize scales the shorter side, so that a crop after it decides the shape.
    for item in reversed(items):
        size = item.get("size")
        if isinstance(size, int) and item["name"] != "torchvision.Resize":
            return size
        if isinstance(size, list | tuple):
            return int(size[0])
    return None


def _apply(transforms: View, probability: float) -> View:
    if probability <= 0 or not transforms:
        return []
    if probability >= 1:
        return list(transforms)
    return [{"name": "apply", "probability": float(probability), "transforms": list(transforms)}]


def _take(params: dict[str, Any], **defaults: Any) -> tuple[dict[str, Any], list[str]]:
    """Return parameters completed by their defaults, and the names of unknown ones."""
    values = {key: params.get(key, default) for key, default in defaults.items()}
    return values, [key for key in params if key not in defaults]


def _random_resized_crop(params: dict[str, Any]) -> tuple[View, list[str]]:
    # `random_resized_crop` is bilinear, Pillow's 2; it runs on batches, so it is preferred.
    if params.get("interpolation", 2) != 2:
        return [{"name": "torchvision.RandomResizedCrop", **params}], []
    params.pop("interpolation", None)
    return [{"name": "random_resized_crop", **params}], []


def _flip(params: dict[str, Any]) -> tuple[View, list[str]]:
    values, unknown = _take(params, p=0.5)
    item: Item = {"name": "random_flip"}
    if values["p"] != 0.5:
        item["probability"] = values["p"]
    return [item], unknown


def _color_distortion(params: dict[str, Any]) -> tuple[View, list[str]]:
    # VISSL reads no other parameter: `brightness` and the like have no effect there.
    jitter = _jitter(params.get("strength", 1.0))
    return [*_apply([jitter], 0.8), {"name": "torchvision.RandomGrayscale", "p": 0.2}], []


def _random_jitter(params: dict[str, Any]) -> tuple[View, list[str]]:
    values, unknown = _take(params, strength=1.0, p=0.8)
    return _apply([_jitter(values["strength"])], values["p"]), unknown


def _jitter(strength: float) -> Item:
    jitter = {key: round(0.8 * strength, 6) for key in ("brightness", "contrast", "saturation")}
    return {"name": "torchvision.ColorJitter", **jitter, "hue": round(0.2 * strength, 6)}


def _blur(params: dict[str, Any]) -> tuple[View, list[str]]:
    values, unknown = _take(params, p=0.5, radius_min=0.1, radius_max=2.0)
    # Pillow's kernel reaches about three standard deviations to each side.
    kernel = 2 * math.ceil(3 * values["radius_max"]) + 1
    sigma = [values["radius_min"], values["radius_max"]]
    blur = {"name": "torchvision.GaussianBlur", "kernel_size": kernel, "sigma": sigma}
    return _apply([blur], values["p"]), unknown


def _solarize(params: dict[str, Any]) -> tuple[View, list[str]]:
    values, unknown = _take(params, p=0.66)
    # Its threshold is drawn from 0 to 256 for each image, which is the default here.
    return [{"name": "random_solarize", "probability": float(values["p"])}], unknown


def _paste_mnist(params: dict[str, Any]) -> tuple[View, list[str]]:
    values, unknown = _take(params, size=[], box=[0, 0])
    size = values["size"]
    width, height = [size, size] if isinstance(size, int) else (size or [MNIST_SIZE, MNIST_SIZE])
    left, top = values["box"]
    right, bottom = width - MNIST_SIZE - left, height - MNIST_SIZE - top
    if min(left, top, right, bottom) < 0:
        return [], [*unknown, "box"]
    # Colours are the work of DATA.*.mode: RGB; pasting onto black is padding.
    padding = {"name": "torchvision.Pad", "padding": [left, top, right, bottom]}
    return [padding] if any(padding["padding"]) else [], unknown


def _rand_augment(params: dict[str, Any]) -> tuple[View, list[str]]:
    values, unknown = _take(
        params,
        magnitude=10,
        num_layers=2,
        magnitude_std=0,
        increasing_severity=False,
        weight_choice=None,
    )
    # VISSL's scale ends at 10, torchvision's at 30.
    item = {
        "name": "torchvision.RandAugment",
        "num_ops": values["num_layers"],
        "magnitude": min(30, 3 * values["magnitude"]),
    }
    return [item], unknown


def _auto_augment(params: dict[str, Any]) -> tuple[View, list[str]]:
    _, unknown = _take(params, policy_name="v0", magnitude_std=0)
    return [{"name": "torchvision.AutoAugment"}], unknown


def _rotate(params: dict[str, Any]) -> tuple[View, list[str]]:
    values, unknown = _take(params, num_angles=4, num_rotations_per_img=1)
    return [{"name": "rotate"}], unknown if values["num_angles"] == 4 else [*unknown, "num_angles"]


def _same_name(name: str) -> Callable[[dict[str, Any]], tuple[View, list[str]]]:
    return lambda params: ([{"name": name, **params}], [])


CONVERTERS: Mapping[str, Callable[[dict[str, Any]], tuple[View, list[str]]]] = {
    "RandomResizedCrop": _random_resized_crop,
    "RandomHorizontalFlip": _flip,
    "CenterCrop": _same_name("center_crop"),
    "Normalize": _same_name("normalize"),
    "ImgRotatePil": _rotate,
    "ImgPilColorDistortion": _color_distortion,
    "ImgPilRandomColorJitter": _random_jitter,
    "ImgPilGaussianBlur": _blur,
    "ImgPilRandomSolarize": _solarize,
    "MNISTImgPil2RGB": _paste_mnist,
    "RandAugment": _rand_augment,
    "AutoAugment": _auto_augment,
}
"""Transform of VISSL -> function from its parameters to transforms here, and the names of
parameters without counterpart."""
