"""JSON Schema of the values that a type annotation accepts, as `config.sections.value_types` checks
them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from phasetrain.config.sections.value_types import (
    NO_BOUNDS,
    ValueType,
    describe_type,
    is_tensor,
    read_shape,
)

JsonSchema = dict[str, Any]

OPEN = r"\$\{|^\?\?\?$"
"""Pattern of the texts that any key takes: an interpolation, and `???` for a missing value."""

_SCALARS: Mapping[Any, str] = {
    bool: "boolean",
    str: "string",
    Path: "string",
    None: "null",
}
_NUMBERS: Mapping[Any, str] = {int: "integer", float: "number"}
_CONTAINERS = {"mapping": ("object", "additionalProperties"), "list": ("array", "items")}
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
# Editors read YAML 1.2, in which these are texts; the config reader has them from YAML 1.1.
_BOOLEAN_WORDS = "^(yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$"
_GROUPED_DIGITS = r"^[-+]?\d+(_\d+)+$"


@dataclass(frozen=True)
class Values:
    """A set of values.

    Attributes:
        types: JSON types, such as `integer`.
        choices: single values.
        limits: keywords of the types, such as `minimum` and `items`.
        alternatives: further schemas.
        is_any: whether all values belong to it.
    """

    types: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    alternatives: tuple[JsonSchema, ...] = ()
    is_any: bool = False

    def __or__(self, other: "Values") -> "Values":
        """Return the union; a limit that only one side has, or another one, is dropped."""
        limits = {}
        for keyword in {**self.limits, **other.limits}:
            owner = _OWNER[keyword]
            sides = [side for side in (self, other) if _has_type(side.types, owner)]
            if all(side.limits.get(keyword) == sides[0].limits.get(keyword) for side in sides):
                limits[keyword] = sides[0].limits[keyword]
        return Values(
            tuple(dict.fromkeys([*self.types, *other.types])),
            _unique([*self.choices, *other.choices]),
            limits,
            _unique([*self.alternatives, *other.alternatives]),
            self.is_any or other.is_any,
        )

    def to_schema(self, expected: str = "") -> JsonSchema:
        """Return the schema; it also takes interpolations and missing values.

        Args:
            expected: the type in words, for the message about another text.
        """
        if self.is_any:
            return {}
        if len(self.alternatives) == 1 and not self.types and not self.choices:
            # Not the alternative itself: draft 7 ignores whatever is next to a reference.
            return {"allOf": list(self.alternatives)}
        types = list(self.types)
        texts = [OPEN]
        if "boolean" in types:
            texts.append(_BOOLEAN_WORDS)
        if "integer" in types or "number" in types:
            texts.append(_GROUPED_DIGITS)
        # One schema for all types, since each limit applies to its own type only: messages of
        # editors about alternatives do not say which one was meant.
        flat: JsonSchema = {"type": [*types, "string"], **self.limits}
        if "string" in types:
            flat["type"] = types
        else:
            flat["pattern"] = "|".join(texts)
            if expected:
                flat["patternErrorMessage"] = f"expected {expected}"
        if len(flat["type"]) == 1:
            flat["type"] = flat["type"][0]
        alternatives = list(self.alternatives)
        if self.choices:
            alternatives.append({"enum": list(self.choices)})
        if not alternatives:
            return flat
        return {"anyOf": [*alternatives, flat]}


NOTHING = Values()
TEXT = Values(("string",))
MAPPING = Values(("object",))
ANYTHING = Values(is_any=True)

_OWNER = {
    **dict.fromkeys(_BOUNDS.values(), "number"),
    **dict.fromkeys(("items", "minItems", "maxItems", "additionalItems"), "array"),
    "additionalProperties": "object",
}


def unite(sets: Iterable[Values]) -> Values:
    """Return the union of sets of values."""
    return reduce(lambda one, other: one | other, sets, NOTHING)


def describe_values(annotation: Any, bounds: Mapping[str, float] = NO_BOUNDS) -> Values:
    """Return the values that an annotation accepts, see `fits`."""
    form, plain, args = read_shape(annotation)
    if form == "union":
        return unite(describe_values(choice, bounds) for choice in args)
    if form == "choice":
        return Values(choices=args)
    if form == "number":
        limits = {_BOUNDS[name]: bound for name, bound in bounds.items()}
        return Values((_NUMBERS[plain],), limits=limits)
    if form == "tuple":
        return Values(
            ("array",),
            limits={
                "items": [_schema_of(item, NO_BOUNDS) for item in args],
                "additionalItems": False,
                "minItems": len(args),
            },
        )
    if form in ("mapping", "list"):
        json_type, keyword = _CONTAINERS[form]
        schema = _schema_of(args[0], bounds) if args else {}
        return Values((json_type,), limits={keyword: schema} if schema else {})
    if plain in _SCALARS:
        return Values((_SCALARS[plain],))
    if is_tensor(plain):
        return Values(("number", "array"))
    return ANYTHING


def add_short_forms(values: Values, value_type: ValueType) -> Values:
    """Return the values of a key with its short forms: a text for a list of one text, and booleans
    for the words `on` and `off`."""
    if value_type.fits(["text"]) and not value_type.fits([{}]):
        values = values | TEXT
    if "boolean" not in values.types:
        words = {"on": True, "off": False}
        read = tuple(value for word, value in words.items() if word in values.choices)
        values = values | Values(choices=read)
    return values


def _schema_of(annotation: Any, bounds: Mapping[str, float]) -> JsonSchema:
    return describe_values(annotation, bounds).to_schema(describe_type(annotation, bounds))


def _has_type(types: Iterable[str], owner: str) -> bool:
    # `minimum` and the like apply to integers too.
    return owner in types or (owner == "number" and "integer" in types)


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return different values in order; schemas cannot be hashed, and True equals 1."""
    unique: list[Any] = []
    for value in values:
        if not any(type(value) is type(earlier) and value == earlier for earlier in unique):
            unique.append(value)
    return tuple(unique)
