"""Transforms of the input by name (`DATA.*.transforms`)."""

from typing import TYPE_CHECKING

from phasetrain.config.exports import export_lazily

if TYPE_CHECKING:
    from phasetrain.data.transforms.apply import Apply, ApplyToSample
    from phasetrain.data.transforms.base import (
        TRANSFORMS,
        BatchTransform,
        Keys,
        Pipeline,
        TargetTransform,
        check_images,
    )
    from phasetrain.data.transforms.center_crop import CenterCrop
    from phasetrain.data.transforms.flatten import Flatten
    from phasetrain.data.transforms.joint.geometric import GeometricTransform, JointTransform
    from phasetrain.data.transforms.joint.kinds import FieldKind, FieldKinds, parse_field_kinds
    from phasetrain.data.transforms.joint.pipeline import FieldPipeline
    from phasetrain.data.transforms.joint.placement import Placement
    from phasetrain.data.transforms.noise import Noise
    from phasetrain.data.transforms.normalize import Normalize
    from phasetrain.data.transforms.on_fields import OnFields
    from phasetrain.data.transforms.random_crop import RandomCrop
    from phasetrain.data.transforms.random_flip import RandomFlip
    from phasetrain.data.transforms.random_shift import RandomShift
    from phasetrain.data.transforms.resize import Resize
else:
    __getattr__, __dir__ = export_lazily(__name__)

__all__ = [
    "TRANSFORMS",
    "Apply",
    "ApplyToSample",
    "BatchTransform",
    "CenterCrop",
    "FieldKind",
    "FieldKinds",
    "FieldPipeline",
    "Flatten",
    "GeometricTransform",
    "JointTransform",
    "Keys",
    "Noise",
    "Normalize",
    "OnFields",
    "Pipeline",
    "Placement",
    "RandomCrop",
    "RandomFlip",
    "RandomShift",
    "Resize",
    "TargetTransform",
    "check_images",
    "parse_field_kinds",
]
