"""Other transforms, applied with a probability."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phasetrain.config.checks import check_fraction
from phasetrain.data.transforms.base import (
    TRANSFORMS,
    BatchTransform,
    Keys,
    Pipeline,
    TargetTransform,
)
from phasetrain.data.transforms.joint.geometric import JointTransform, Values
from phasetrain.data.transforms.joint.kinds import FieldKinds
from phasetrain.data.transforms.joint.pipeline import check_kinds, transform_in_turn
from phasetrain.errors import ConfigError


class _ApplyToFields(JointTransform):
    """Transforms the fields of a sample with a probability, all or none."""

    def __init__(self, pipeline: Pipeline, probability: float) -> None:
        self.pipeline = pipeline
        self.probability = probability

    def check_kinds(self, kinds: FieldKinds, where: str) -> None:
        """Check the transforms within this one."""
        check_kinds(self.pipeline.transforms, kinds, f"{where}.transforms")

    def transform_fields(self, values: Values, kinds: FieldKinds, key: Keys) -> Values:
        """Return the fields of one sample, transformed or not."""
        if key.uniform()[0] >= self.probability:
            return values
        return transform_in_turn(self.pipeline, values, kinds, key.fork(0))


class Apply(BatchTransform, _ApplyToFields):
    """Transforms each sample of a batch with a probability, and leaves the others as they are; the
    fields of a sample all together.

    Args:
        pipeline: BatchTransforms, which keep the shape and the type of a sample.
        probability: probability of each sample, in [0, 1].
    """

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        """Return the batch with some samples transformed, same shape.

        Raises:
            ValueError: the transforms change the shape.
        """
        chosen = keys.uniform() < self.probability
        if not chosen.any():
            return batch
        index = torch.from_numpy(chosen.nonzero()[0])
        # Streams 0, 1, ... are those of the pipeline: its first draw must not be the one above.
        transformed = self.pipeline(batch[index], Keys(keys.fork(0).values[chosen]))
        if not isinstance(transformed, Tensor) or transformed.shape[1:] != batch.shape[1:]:
            raise ValueError(
                "apply: its transforms change the shape of a sample, so that transformed and other "
                "samples do not fit into a batch; move such transforms out of it"
            )
        result = batch.clone()
        result[index] = transformed
        return result


class ApplyToSample(_ApplyToFields):
    """Transforms a single sample with a probability, if a transform does not take whole batches.

    Args:
        pipeline: the transforms; the choice and the keys of BatchTransforms are drawn from torch's
            generator, which is seeded before each sample.
        probability: probability of each sample, in [0, 1].
    """

    def __call__(self, sample: Any) -> Any:
        """Return the sample, transformed or not."""
        # Drawn in any case, so that the draws of later transforms do not depend on the choice.
        key = Keys([int(torch.randint(2**62, ()))])
        if float(torch.rand(())) < self.probability:
            return self.pipeline.transform_sample(sample, key)
        return sample


@TRANSFORMS.register("apply")
def make_apply(
    transforms: Sequence[str | Mapping[str, Any]], probability: float = 0.5
) -> Apply | ApplyToSample:
    """Apply transforms, all or none, to each sample with a probability.

    Args:
        transforms: a list as in `DATA.*.transforms`.
        probability: probability, in [0, 1].

    Raises:
        ValueError: there are no transforms, or a probability outside [0, 1].

    Example:
        >>> make_apply([{"name": "noise", "std": 0.1}], probability=0.8)(batch, keys)
    """
    check_fraction(probability=probability)
    if not transforms:
        raise ValueError("transforms = []: expected at least one, such as [random_flip]")
    pipeline = Pipeline(build_transforms(transforms, "transforms"))
    if pipeline.is_batched:
        return Apply(pipeline, probability)
    return ApplyToSample(pipeline, probability)


def build_transforms(
    items: Sequence[str | Mapping[str, Any]], where: str
) -> list[Callable[..., Any]]:
    """Return the transforms that a list within the parameters of a transform describes.

    Args:
        items: names, or mappings with `name` and parameters.
        where: path of the list below the transform, for messages.

    Raises:
        ValueError: one of them cannot be built.
    """
    transforms = []
    for at, item in enumerate(items):
        section: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item)
        name = section.pop("name", None)
        try:
            transforms.append(TRANSFORMS.build(name, section, where=f"{where}[{at}]"))
        except ConfigError as error:
            # The registry that builds the outer transform adds the split to the message.
            raise ValueError(str(error)) from error
        if isinstance(transforms[-1], TargetTransform):
            raise ValueError(  # noqa: TRY004 - the registry wraps it
                f"{where}[{at}] = {name}: it makes the target, so it cannot be within another "
                "transform; move it to the list of the split"
            )
    return transforms
