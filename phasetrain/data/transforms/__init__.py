"""Transforms of the input by name (`DATA.*.transforms`)."""

from phasetrain.addons.libraries.albumentations import find_albumentations_transform
from phasetrain.data.transforms.apply import Apply, ApplyToSample
from phasetrain.data.transforms.base import (
    TRANSFORMS,
    BatchTransform,
    Keys,
    Pipeline,
    TargetTransform,
    check_images,
)
from phasetrain.addons.libraries.torchvision_transforms import find_torchvision_transform
from phasetrain.data.transforms.center_crop import CenterCrop
from phasetrain.data.transforms.flatten import Flatten
from phasetrain.data.transforms.joint.geometric import GeometricTransform, JointTransform
from phasetrain.data.transforms.joint.kinds import FieldKind, FieldKinds, parse_field_kinds
from phasetrain.data.transforms.joint.pipeline import FieldPipeline
from phasetrain.data.transforms.joint.placement import Placement
from phasetrain.addons.vision.multi_crop import MultiCrop, MultiCropOfSamples
from phasetrain.data.transforms.noise import Noise
from phasetrain.data.transforms.normalize import Normalize
from phasetrain.data.transforms.on_fields import OnFields
from phasetrain.data.transforms.random_crop import RandomCrop
from phasetrain.data.transforms.random_erase import RandomErase
from phasetrain.data.transforms.random_flip import RandomFlip
from phasetrain.data.transforms.random_resized_crop import RandomResizedCrop
from phasetrain.data.transforms.random_rotate import RandomRotate
from phasetrain.data.transforms.random_shift import RandomShift
from phasetrain.data.transforms.resize import Resize
from phasetrain.data.transforms.rotate import Rotate

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
    "MultiCrop",
    "MultiCropOfSamples",
    "Noise",
    "Normalize",
    "OnFields",
    "Pipeline",
    "Placement",
    "RandomCrop",
    "RandomErase",
    "RandomFlip",
    "RandomResizedCrop",
    "RandomRotate",
    "RandomShift",
    "Resize",
    "Rotate",
    "TargetTransform",
    "check_images",
    "find_albumentations_transform",
    "find_torchvision_transform",
    "parse_field_kinds",
]
