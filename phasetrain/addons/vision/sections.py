"""Keys of the models within a part of this add-on, next to the parameters of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class TeacherSection(Section):
    """Keys of another model of the task next to the parameters of the model."""

    weights: str | Mapping[str, Any] | tuple[Any, ...] | None = key(
        None, "its trained weights, as for MODEL.weights", resume="forbidden"
    )


@dataclass(frozen=True, kw_only=True)
class TrunkSection(Section):
    """Keys of MODEL.trunk next to the parameters of the model."""

    cut: str | None = key(
        None, "name of the last module of the trunk; null: the whole model", resume="forbidden"
    )


@dataclass(frozen=True, kw_only=True)
class HeadSection(Section):
    """Keys of an entry of MODEL.heads next to the parameters of the model."""

    from_: str | tuple[str, ...] | None = key(
        None,
        "name of the trunk's module whose output the head gets; several: their outputs, pooled and "
        "concatenated; null: the output of the trunk",
        resume="forbidden",
    )
    norm: str | None = key(
        None,
        "name of the trunk's module, such as its last layer norm, that each of these outputs goes "
        "through first",
        resume="forbidden",
    )
    input: str | None = key(
        None, "entry of the inputs that the trunk gets; null: all of them", resume="forbidden"
    )
    pool: int | str | tuple[int, ...] | Mapping[str, Any] | None = key(
        None,
        "pooling before the head: the size to which feature maps are average-pooled, or its rows "
        "and columns; `first` token; `mean` over positions; or a mapping with `size`, or with "
        "`kernel`, `stride` and `padding`, and `kind`: mean or max",
        resume="forbidden",
        ge=1,
    )
    detach: bool = key(
        False, "do not propagate the head's gradient into the trunk", resume="forbidden"
    )
