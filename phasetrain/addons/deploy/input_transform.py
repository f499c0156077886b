"""The transforms of a test split, for inputs that come from outside of a dataset."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.data.datasets import DATASETS
from phasetrain.data.loading.collate import (
    Collate,
    PadCollate,
    UnequalShapesError,
    stack_samples,
)
from phasetrain.data.transforms import Keys, OnFields, Pipeline, TargetTransform
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.proof.compare import differences
from phasetrain.runtime.machine import preserve_generators, reseed_all
from phasetrain.tasks.build.data_builder import build_transforms
from phasetrain.tasks.build.loading_builder import build_collate, build_selection, find_field_kinds
from phasetrain.tasks.build.sections import BuildContext
from phasetrain.tasks.shape_errors import raise_unless_shape_error


class InputTransform:
    """The transforms of a split and its collate function: from raw inputs to a batch for the model.

    A collate function gets the target None. If it does not take that, it gets numbers, and its
    inputs have to be the same for all of them.

    Random transforms draw the same numbers for each sample, so that a result depends on the sample
    alone; the generators of the caller are not advanced.

    Args:
        split: config path of the split, such as `DATA.TEST`.
        pipeline: its transforms.
        described: one text per transform.
        collate: makes a batch of samples.
        scales_bytes: the samples are images: uint8 in [0, 255] is divided by 255 first, as the
            datasets of images do.

    Example:
        >>> task.transform
        InputTransform(DATA.TEST: normalize(mean=[0.5], std=[0.25]))
        >>> batch = task.transform(images)
    """

    def __init__(
        self,
        split: str,
        pipeline: Pipeline,
        described: Sequence[str] = (),
        collate: Collate = stack_samples,
        *,
        scales_bytes: bool = False,
    ) -> None:
        self.split = split
        self.pipeline = pipeline
        self.described = tuple(described)
        self._collate = collate
        self.scales_bytes = scales_bytes

    def __repr__(self) -> str:
        return f"InputTransform({self.split}: {', '.join(self.described) or 'none'})"

    def __bool__(self) -> bool:
        return bool(self.pipeline.transforms)

    def __call__(self, inputs: Any) -> Any:
        """Return the batch for the model.

        Args:
            inputs: N samples as the dataset gives them: a tensor or an array `(N, ...)`, a mapping
                of them, or a sequence of samples, which may differ in shape; images may be uint8 in
                [0, 255].

        Raises:
            ConfigError: a transform or the collate function does not take them.
        """
        if isinstance(inputs, np.ndarray):
            inputs = torch.from_numpy(inputs)
        if isinstance(inputs, Tensor):
            inputs = self._scale_bytes(inputs)
        try:
            if isinstance(inputs, Mapping):
                rows = zip(*inputs.values(), strict=True)
                inputs = [dict(zip(inputs, row, strict=True)) for row in rows]
            with preserve_generators():
                if isinstance(inputs, Tensor) and self._takes_batches:
                    return self.pipeline(inputs, Keys(np.zeros(len(inputs))))
                return self._collate_inputs([self._transform_sample(sample) for sample in inputs])
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            raise ConfigError(
                f"{self.split}.transforms do not take these inputs: {error}; expected samples as "
                "the dataset gives them, or transform=False for transformed inputs",
                code="predict.wrong_input",
            ) from error

    @property
    def _takes_batches(self) -> bool:
        return self.pipeline.is_batched and self._collate is stack_samples

    @property
    def adds_mask(self) -> bool:
        """Whether the collate function pads inputs and says where."""
        return isinstance(self._collate, PadCollate) and self._collate.mask is not None

    def _collate_inputs(self, samples: Sequence[Any]) -> Any:
        collate = self._collate
        if isinstance(collate, PadCollate):
            # It may pad fields of the targets, such as boxes, which no prediction has.
            collate = collate.select_names(next(iter(samples), None))
        try:
            return _collate_with(collate, samples, None)
        except UnequalShapesError:
            raise
        except Exception as error:
            if getattr(collate, "__module__", "").startswith("phasetrain.data."):
                raise
            raise_unless_shape_error(error)
            return self._collate_any_target(samples, error)

    def _collate_any_target(self, samples: Sequence[Any], error: Exception) -> Any:
        """Return the batch of a collate function that does not take the target None, if its inputs
        are the same for any target.

        Raises:
            ConfigError: it takes no number as a target either, or the inputs depend on it.
        """
        try:
            first, other = (_collate_with(self._collate, samples, target) for target in (0, 1))
        except Exception as failure:
            raise_unless_shape_error(failure)
            reason = f"fails for the target None ({type(error).__name__}: {error}), and for numbers"
            raise self._make_collate_error(reason) from failure
        if differences(first, other):
            raise self._make_collate_error("makes inputs that depend on the target") from error
        return first

    def _make_collate_error(self, reason: str) -> ConfigError:
        name = getattr(self._collate, "__qualname__", type(self._collate).__qualname__)
        return ConfigError(
            f"{self.split}.collate = {name}: it {reason}; a prediction has no target: let the "
            "function return the batch of inputs for samples (input, None), or collate the inputs "
            "yourself and set transform=False",
            code="predict.collate",
        )

    def _transform_sample(self, sample: Any) -> Any:
        reseed_all(0)
        return self.pipeline.transform_sample(self._scale_bytes(sample), Keys([0]))

    def _scale_bytes(self, values: Any) -> Any:
        if self.scales_bytes and isinstance(values, np.ndarray):
            values = torch.from_numpy(values)
        if self.scales_bytes and isinstance(values, Tensor) and values.dtype == torch.uint8:
            return values.float() / 255
        return values


def build_input_transform(context: BuildContext, split: str) -> InputTransform:
    """Return the transforms of a split for inputs from outside of its dataset, which is not opened.

    Args:
        context: config and machine.
        split: key of the split in DATA, such as `TEST`.
    """
    where = f"DATA.{split}"
    section = context.config.DATA[split]
    transforms = build_transforms(context, where, section)
    # The dataset is not opened, but its class may declare fields.
    kinds = find_field_kinds(where, section, DATASETS.find(section.dataset, where))
    inputs = build_selection(where, section, kinds).inputs
    # Inference has no targets: a transform that makes them would change inputs for nothing.
    kept = [
        (
            transform.as_input_transform() if isinstance(transform, OnFields) else transform,
            describe_transform(item),
        )
        for transform, item in zip(transforms, section.transforms, strict=True)
        if not isinstance(transform, TargetTransform)
        and not (isinstance(transform, OnFields) and inputs not in transform.fields)
    ]
    return InputTransform(
        where,
        Pipeline([transform for transform, _ in kept]),
        [text for _, text in kept],
        build_collate(where, section.collate),
    )


def _collate_with(collate: Collate, samples: Sequence[Any], target: int | None) -> Any:
    """Return the inputs of the batch of samples that all have this target."""
    reseed_all(0)
    return collate([(sample, target) for sample in samples])[0]


def describe_transform(item: Any) -> str:
    """Return a transform of a config as a text, `normalize(mean=[0.5], std=[0.25])`."""
    if isinstance(item, str):
        return item
    options = [f"{key}={json.dumps(value)}" for key, value in item.items() if key != "name"]
    if not options:
        return str(item["name"])
    return f"{item['name']}({', '.join(options)})"
