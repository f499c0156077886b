"""Transforms of some fields of a sample only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phasetrain.data.transforms.apply import build_transforms, make_apply
from phasetrain.data.transforms.base import TRANSFORMS, Keys, Pipeline
from phasetrain.data.transforms.joint.geometric import JointTransform, Values
from phasetrain.data.transforms.joint.kinds import FieldKinds
from phasetrain.data.transforms.joint.pipeline import check_kinds, transform_in_turn
from phasetrain.errors import ConfigError, did_you_mean


@TRANSFORMS.register("on_fields")
class OnFields(JointTransform):
    """Applies transforms to some of the fields of a sample, with one draw for these.

    Args:
        fields: names of fields, or places in a list or tuple.
        transforms: a list as in `DATA.*.transforms`.

    Raises:
        ValueError: no fields or no transforms.
        ConfigError: a field is not declared.
    """

    def __init__(
        self, fields: Sequence[str | int], transforms: Sequence[str | Mapping[str, Any]]
    ) -> None:
        if not fields or not transforms:
            raise ValueError(
                f"fields = {list(fields)} and transforms = {list(transforms)}: expected at least "
                "one of each"
            )
        self.fields = tuple(fields)
        self.transforms = transforms
        self.pipeline = Pipeline(build_transforms(transforms, "transforms"))

    def as_input_transform(self) -> Callable[..., Any]:
        """Return the transforms for inputs without the other fields."""
        return make_apply(self.transforms, probability=1.0)

    def check_kinds(self, kinds: FieldKinds, where: str) -> None:
        """Reject names of fields that are not declared.

        Raises:
            ConfigError: there is one.
        """
        for name in self.fields:
            if name not in kinds:
                near = did_you_mean(str(name), [str(field) for field in kinds]) or ";"
                raise ConfigError(
                    f"{where}.fields = {name!r}: this field is not declared{near} there are "
                    f"{', '.join(map(str, kinds))}",
                    code="config.missing_field",
                )
        check_kinds(self.pipeline.transforms, self._choose(kinds), f"{where}.transforms")

    def transform_fields(self, values: Values, kinds: FieldKinds, key: Keys) -> Values:
        """Return the changed fields of one sample."""
        return transform_in_turn(self.pipeline, values, self._choose(kinds), key)

    def _choose(self, kinds: FieldKinds) -> FieldKinds:
        return {name: field_kind for name, field_kind in kinds.items() if name in self.fields}
