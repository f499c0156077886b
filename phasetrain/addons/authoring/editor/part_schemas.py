"""JSON Schema of the parameters of parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasetrain.addons.authoring.editor.texts import argument_texts, summarize, value_texts
from phasetrain.addons.authoring.editor.value_schemas import (
    ANYTHING,
    MAPPING,
    OPEN,
    JsonSchema,
    Values,
    describe_values,
    unite,
)
from phasetrain.config.problems import format_value
from phasetrain.config.registry import free_parameters, parameter_types, parameters
from phasetrain.config.schema import default_schema
from phasetrain.config.sections.keys import Resume
from phasetrain.config.sections.value_types import describe_type
from phasetrain.config.validation import PartLocation
from phasetrain.hooks.observers import is_observer

OPEN_NAME = rf"\.|^object:|{OPEN}"
"""Pattern of names that are in no registry: dotted paths, names of a library, objects of Python."""

Nested = Callable[[PartLocation, str, str], JsonSchema | None]
"""Returns the schema of a parameter that holds other parts, given the slot, the part and the
parameter; None for all others."""


@dataclass(frozen=True)
class PartSchema:
    """Parameters of one part, as a config sets them.

    Attributes:
        parameters: parameter -> its schema.
        values: parameter -> its values, for the union over parts.
        schedules: options of an optimizer that a schedule may change; None for other parts.
    """

    parameters: Mapping[str, JsonSchema]
    values: Mapping[str, Values]
    schedules: tuple[str, ...] | None = None

    def close(self, own: Iterable[str]) -> JsonSchema:
        """Return the schema of a mapping that has the parameters, other known keys, and no more."""
        properties: dict[str, Any] = {name: True for name in own if name not in self.parameters}
        if self.schedules is not None and "SCHEDULES" in properties:
            properties["SCHEDULES"] = {
                "properties": {
                    option: {"description": f"schedule of {option}"} for option in self.schedules
                },
                "propertyNames": {"enum": list(self.schedules)},
            }
        return {"properties": {**properties, **self.parameters}, "additionalProperties": False}


def describe_part(slot: PartLocation, name: str, nested: Nested) -> PartSchema:
    """Return the parameters of a part, without those that the program sets."""
    factory = slot.registry.find(name)
    texts = argument_texts(factory)
    types = parameter_types(factory)
    schemas: dict[str, JsonSchema] = {}
    values: dict[str, Values] = {}
    for key, parameter in parameters(factory).items():
        if key in slot.provided:
            continue
        type_text = ""
        values[key] = ANYTHING
        inner = nested(slot, name, key)
        if inner is not None:
            values[key] = Values(alternatives=(inner,))
        elif key in types:
            values[key] = describe_values(types[key])
            type_text = describe_type(types[key])
        if parameter.default is None:
            # Libraries often annotate an optional parameter without None.
            values[key] |= Values(("null",))
        default = ""
        if parameter.default is not parameter.empty:
            default = format_value(parameter.default)
        resume = find_resume(slot, name, key)
        about = value_texts(texts.get(key, ""), type_text, default, resume, f"{slot.path}.{key}")
        schemas[key] = {**values[key].to_schema(type_text), **about}
        if isinstance(parameter.default, bool | int | float | str):
            schemas[key]["default"] = parameter.default
    schedules = None
    if free_parameters(factory):
        schemas["params"] = {"type": "object", "description": "further parameters"}
        values["params"] = MAPPING
    elif slot.kind == "optimizer":
        schedules = tuple(dict.fromkeys(["lr", *schemas]))
    return PartSchema(schemas, values, schedules)


def unite_parts(parts: Sequence[PartSchema]) -> PartSchema:
    """Return the parameters of all parts, for a place whose part is not known."""
    schemas: dict[str, JsonSchema] = {}
    values: dict[str, Values] = {}
    schedules: dict[str, None] = {}
    for name in dict.fromkeys(name for part in parts for name in part.parameters):
        having = [part for part in parts if name in part.parameters]
        values[name] = unite(part.values[name] for part in having)
        texts: JsonSchema = {
            key: having[0].parameters[name][key]
            for key in ("description", "markdownDescription")
            if key in having[0].parameters[name]
        }
        schemas[name] = {**values[name].to_schema(), **texts}
    for part in parts:
        schedules |= dict.fromkeys(part.schedules or ())
    return PartSchema(schemas, values, tuple(schedules) or None)


def describe_name(slot: PartLocation, names: Sequence[str], texts: Mapping[str, Any]) -> JsonSchema:
    """Return the schema of the key that names a part: a known name, or an open one."""
    open_name = {"type": "string", "pattern": OPEN_NAME}
    if not names:  # the standard has no empty enum
        return {"anyOf": [open_name], **texts}
    listed_names = {
        "enum": list(names),
        "markdownEnumDescriptions": [summarize(slot.registry.find(name)) for name in names],
    }
    return {"anyOf": [listed_names, open_name], **texts}


def find_resume(slot: PartLocation, name: str, parameter: str = "name") -> Resume:
    """Return the class for resume of a parameter of a part."""
    schema = default_schema()
    if slot.path == "HOOKS.*":
        # The class depends on the hook, and no config is known that has it.
        schema = schema.with_observers(filter(is_observer, [name]))
        return schema.resume(f"HOOKS.{name}.{parameter}")
    return schema.resume(f"{slot.path}.{parameter}")
