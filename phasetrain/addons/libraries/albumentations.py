"""Transforms of Albumentations by name: `albumentations.RandomBrightnessContrast`."""

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasetrain.addons.libraries.torchvision_fields import CENTER
from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.data.transforms.base import TRANSFORMS, BatchTransform, Keys
from phasetrain.data.transforms.joint.geometric import JointTransform, Values, drop_small_boxes
from phasetrain.data.transforms.joint.kinds import FieldKind, FieldKinds
from phasetrain.data.transforms.joint.placement import clip_boxes, hide_points, select_rows

ROWS = "rows"
"""Label field of boxes: which row of the sample a box was."""


@TRANSFORMS.bridge("albumentations", "albumentations")
def find_albumentations_transform(name: str) -> Factory[Any] | None:
    """Return a factory of Albumentations' transform `name`, with the parameters of its class; None
    if `name` is a path inside Albumentations.

    Raises:
        UnknownNameError: there is no such transform.
    """
    import albumentations

    if "." in name:
        return None
    kinds: dict[str, type[Any]] = {
        class_name: thing
        for class_name, thing in vars(albumentations).items()
        if inspect.isclass(thing)
        and issubclass(thing, albumentations.BasicTransform)
        and not inspect.isabstract(thing)
    }
    if name not in kinds:
        raise UnknownNameError(name, kinds)
    transform_class = kinds[name]

    def build(**params: Any) -> FieldAugmentation:
        return FieldAugmentation(transform_class(**params))

    # The registry reads signature and annotations to check and document parameters.
    vars(build)["__signature__"] = inspect.signature(transform_class)
    build.__annotations__ = _read_hints(transform_class)
    build.__doc__ = transform_class.__doc__
    return build


def _read_hints(kind: type[Any]) -> dict[str, Any]:
    try:
        hints = get_type_hints(kind.__init__)
    except (NameError, TypeError):
        return {}  # unresolvable annotations are not checked
    return {name: hint for name, hint in hints.items() if name != "return"}


class FieldAugmentation(BatchTransform, JointTransform):
    """A transform of Albumentations, whose generators are seeded from the key of each sample.

    Images are float32 in [0, 1], as Albumentations expects as well.

    Args:
        transform: the transform.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self._composed: dict[tuple[tuple[str, str], ...], Any] = {}

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return transformed images `(N, C, h, w)`."""
        kinds: FieldKinds = {"image": FieldKind("image")}
        images = [
            self.transform_fields({"image": image}, kinds, keys.select(at))["image"]
            for at, image in enumerate(batch)
        ]
        return torch.stack(images)

    def transform_fields(self, values: Values, kinds: FieldKinds, key: Keys) -> Values:
        """Return the fields after one call of the transform, which draws once for all of them.

        Raises:
            ValueError: there is no image.
        """
        names = _name_targets(kinds)
        self._check_targets(names)
        if not self.moves_pixels:
            names = {name: target for name, target in names.items() if kinds[name].kind == "image"}
        if "image" not in names.values():
            raise ValueError("Albumentations takes samples with an image, and there is none")
        composed = self._compose(names, kinds)
        # Two generators of its own, which would otherwise depend on the worker and its history.
        composed.set_random_seed(key.make_seeds()[0] % 2**32)
        inputs = {
            target: _to_array(values[name], kinds[name])
            for name, target in names.items()
            if kinds[name].kind != "labels"
        }
        if "bboxes" in inputs:
            inputs[ROWS] = np.arange(len(inputs["bboxes"]))
        outputs = composed(**inputs)
        image = next(name for name, target in names.items() if target == "image")
        size = outputs["image"].shape[:2]
        changed: dict[str | int, Any] = {}
        for name, target in names.items():
            changed[name] = _to_tensor(outputs[target], values[name], kinds[name], size)
        if ROWS in inputs:
            changed |= _select_boxes(values, kinds, outputs[ROWS])
        assert isinstance(changed[image], Tensor), "an image stays a tensor"
        return drop_small_boxes({**values, **changed}, kinds)

    @property
    def moves_pixels(self) -> bool:
        """Whether the transform changes more than the values of pixels."""
        return "mask" in self.transform.available_keys

    def _check_targets(self, names: Mapping[str | int, str]) -> None:
        """Reject boxes or key points that would stay where they are while the pixels move."""
        for name, target in names.items():
            supported = self.transform.available_keys
            if self.moves_pixels and target in ("bboxes", "keypoints") and target not in supported:
                raise ValueError(
                    f"{type(self.transform).__name__} of Albumentations moves pixels, but no "
                    f"{target} ({name}); use another transform"
                )

    def _compose(self, names: dict[str | int, str], kinds: FieldKinds) -> Any:
        """Return the transform with the targets of some fields, which is made once."""
        import albumentations

        targets = tuple((target, kinds[name].kind) for name, target in names.items())
        if targets not in self._composed:
            used = {target for target, _ in targets}
            boxes = points = None
            if "bboxes" in used:
                boxes = albumentations.BboxParams("pascal_voc", label_fields=[ROWS], clip=True)
            if "keypoints" in used:
                points = albumentations.KeypointParams("xy", remove_invisible=False)
            self._composed[targets] = albumentations.Compose(
                [self.transform],
                bbox_params=boxes,
                keypoint_params=points,
                additional_targets={
                    target: target_type
                    for target, target_type in targets
                    if target_type in ("image", "mask") and target != "image"
                },
            )
        return self._composed[targets]


def _name_targets(kinds: FieldKinds) -> dict[str | int, str]:
    """Return field -> name of the target of Albumentations; its first image has a fixed name."""
    targets: dict[str | int, str] = {}
    for name, field_kind in kinds.items():
        if field_kind.kind == "image":
            targets[name] = f"field_{name}" if "image" in targets.values() else "image"
        elif field_kind.kind == "mask":
            targets[name] = f"field_{name}"
        elif field_kind.kind == "boxes":
            targets[name] = "bboxes"
        elif field_kind.kind == "keypoints":
            targets[name] = "keypoints"
    return targets


def _to_array(value: Tensor, kind: FieldKind) -> NDArray[Any]:
    if kind.kind == "image":
        return np.ascontiguousarray(value.permute(1, 2, 0).numpy())
    if kind.kind == "mask":
        # As float32, which every function of OpenCV takes, and above the fill, so that the 0 that
        # Albumentations adds by default means the fill. Classes below 2**24 stay exact.
        planes = (value - kind.fill).float().reshape(-1, *value.shape[-2:])
        return np.ascontiguousarray(planes.permute(1, 2, 0).numpy())
    if kind.kind == "keypoints":
        return (value[..., :2].reshape(-1, 2) - CENTER).numpy()
    return value.numpy()


def _to_tensor(
    found: NDArray[Any], before: Tensor, kind: FieldKind, size: tuple[int, int]
) -> Tensor:
    if kind.kind == "boxes":
        boxes = torch.from_numpy(np.asarray(found, dtype=np.float32)).reshape(-1, 4)
        return clip_boxes(boxes, size)
    if kind.kind == "keypoints":
        points = torch.from_numpy(np.asarray(found, dtype=np.float32)[:, :2])
        shape = (*before.shape[:-1], 2)
        return hide_points(points.reshape(shape) + CENTER, before[..., 2:], size)
    plane = found[..., None] if found.ndim == 2 else found
    tensor = torch.from_numpy(np.ascontiguousarray(plane)).permute(2, 0, 1).contiguous()
    if kind.kind == "mask":
        classes = tensor.round().long() + kind.fill
        return classes.reshape(*before.shape[:-2], *size)
    return tensor


def _select_boxes(values: Values, kinds: FieldKinds, rows: NDArray[Any]) -> dict[str | int, Any]:
    """Return the fields per box without the boxes that Albumentations has dropped."""
    boxes = next(name for name, field_kind in kinds.items() if field_kind.kind == "boxes")
    kept = torch.zeros(len(values[boxes]), dtype=torch.bool)
    kept[torch.as_tensor(np.asarray(rows, dtype=np.int64))] = True
    return {
        name: select_rows(values[name], kept)
        for name, field_kind in kinds.items()
        if field_kind.per_box and name != boxes
    }
