"""JSON Schema of the sections of the config and of the parts that they name."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phasetrain.addons.authoring.editor.part_schemas import (
    PartSchema,
    describe_name,
    describe_part,
    find_resume,
    unite_parts,
)
from phasetrain.addons.authoring.editor.texts import key_texts, summarize, value_texts
from phasetrain.addons.authoring.editor.value_schemas import (
    OPEN,
    JsonSchema,
    add_short_forms,
    describe_values,
)
from phasetrain.config.schema import DEFAULT_NAMES, LABELLED, matches
from phasetrain.config.sections.keys import Key, section_keys, walk_section
from phasetrain.config.validation import PartLocation

SPLIT = "^(?!TRAIN$)[A-Z][A-Z0-9_]*$"
"""Pattern of the names of test splits."""


class SchemaBuilder:
    """Makes definitions that refer to each other.

    Args:
        slots: places where a name chooses a part.
        extra: path of a slot -> names in addition to the names in its registry.

    Attributes:
        definitions: name -> schema.
        properties: dotted path -> schema of a key, section or parameter of a section's part.
    """

    def __init__(self, slots: Sequence[PartLocation], extra: Mapping[str, Iterable[str]]) -> None:
        self.definitions: dict[str, JsonSchema] = {}
        self.properties: dict[str, JsonSchema] = {}
        self._slots = slots
        self._extra = extra

    def add_section(self, section: Any, path: str) -> JsonSchema:
        """Add the definition of a section or group of keys, and return a reference to it; of the
        whole config, return the schema itself."""
        own: dict[str, JsonSchema] = {}
        for here, key, below in walk_section(section, path):
            if key is None:
                schema = self.add_section(below, here)
            else:
                schema = self._describe_key(key)
            own[here.rpartition(".")[2]] = self.properties[here] = schema
        slot = self._find_slot(path)
        if slot is not None:
            schema = self._describe_part_mapping(slot, own)
            # Stages may change some parameters, whatever the part is.
            parameters = self._unite(slot).parameters
            self.properties |= {
                f"{path}.{name}": parameter_schema for name, parameter_schema in parameters.items()
            }
        elif path in LABELLED:
            schema = self._describe_labels(self._find_slot(f"{path}.*"), own)
        else:
            schema = describe_mapping(own)
        if path == "DATA":
            schema["patternProperties"] = {SPLIT: self.properties["DATA.TEST"]}
        elif matches(path, "DATA.*"):
            schema["type"] = ["object", "null", "string"]  # null removes a split
        text = " ".join(inspect.cleandoc(section.__doc__).split())
        schema |= {"description": text, "markdownDescription": text}
        if not path:
            return schema
        return self._define(path, schema)

    def _describe_key(self, key: Key) -> JsonSchema:
        part = self._find_slot(key.path)
        label = self._find_slot(f"{key.path}.*")
        item = self._find_slot(f"{key.path}[]")
        if label is not None:
            schema = self._describe_labels(label, {})
        elif part is not None:
            schema = {"anyOf": [self._refer_to(part)]}
            if key.type.fits(None):
                schema["anyOf"].append({"type": "null"})
        elif item is not None:
            schema = {**_LIST, "items": self._refer_to(item)}
        elif key.fields is not None:
            schema = self._describe_fields(key)
        else:
            values = describe_values(key.type.annotation, key.type.bounds)
            schema = add_short_forms(values, key.type).to_schema(key.type.text)
        if isinstance(key.default, bool | int | float | str):
            schema["default"] = key.default
        return {**schema, **key_texts(key)}

    def _describe_fields(self, key: Key) -> JsonSchema:
        """Return the schema of a key with known keys below it."""
        own = {
            name: self._describe_key(below)
            for name, below in section_keys(key.fields, key.path).items()
        }
        values = describe_values(key.type.annotation)
        schema = values.to_schema(key.type.text)
        schema |= {"properties": own, "additionalProperties": False}
        return schema

    def _describe_labels(
        self, slot: PartLocation | None, own: Mapping[str, JsonSchema]
    ) -> JsonSchema:
        """Return the schema of a mapping from labels to parts.

        Args:
            slot: place of each part.
            own: labels that the defaults have, with their texts.
        """
        assert slot is not None
        self._refer_to(slot)
        base = {"$ref": _reference(f"{slot.path} by name")}
        schema = describe_mapping({})
        schema["additionalProperties"] = self._refer_to(slot)
        if slot.path.removesuffix(".*") in LABELLED:
            schema["type"] = ["object", "null", "string"]
        if slot.path not in DEFAULT_NAMES:
            return schema
        for name in self._list_names(slot):
            about = _pick_texts(own.get(name, {}))
            if not about:
                resume = find_resume(slot, name)
                path = slot.path.replace("*", name)
                about = value_texts(summarize(slot.registry.find(name)), "", "", resume, path)
            alone = self._describe_part(slot, name).close(self._list_own(slot))
            unnamed = {"if": {"required": [slot.key]}, "else": alone}
            schema["properties"][name] = {"allOf": [base, unnamed], **about}
        return schema

    def _refer_to(self, slot: PartLocation) -> JsonSchema:
        """Return a reference to the definition of a place, which is added on first use."""
        name = slot.path
        if _escape(name) in self.definitions:
            return {"$ref": _reference(name)}
        self._define(name, {})  # before its parts, which may refer to it
        own = {key: self._describe_key(own_key) for key, own_key in slot.own_keys.items()}
        for key in slot.other_keys:
            own[key] = self.properties[f"DATA.TRAIN.{key}"]
        schema = self._describe_part_mapping(slot, own)
        if slot.path.endswith("[]"):
            # Lists are not merged, so no other file can name the part.
            schema["required"] = [slot.key]
        if slot.path.endswith(".*"):
            schema["type"] = ["object", "null", "string"]  # null removes a label
        if slot.path in DEFAULT_NAMES:
            unnamed = schema["allOf"].pop()
            self._define(f"{name} by name", schema)
            # Any other file could name the part of a label, but not of an empty mapping.
            empty = {"type": "object", "maxProperties": 0}
            schema = {
                "allOf": [
                    {"$ref": _reference(f"{name} by name")},
                    unnamed,
                    {"if": empty, "then": {"required": [slot.key]}},
                ]
            }
        elif slot.takes_bare_name:
            names = describe_name(slot, self._list_names(slot), {})["anyOf"]
            schema["type"] = [type_name for type_name in schema["type"] if type_name != "string"]
            schema.pop("pattern")
            schema = {"anyOf": [schema, *names]}
        return self._define(name, schema)

    def _describe_part_mapping(
        self, slot: PartLocation, own: Mapping[str, JsonSchema]
    ) -> JsonSchema:
        """Return the schema of a mapping that names a part and has its parameters.

        The last entry of its `allOf` is for a mapping without the name, which another file gives.
        """
        names = self._list_names(slot)
        key = slot.key
        own = {key: {}, **own}
        named = describe_name(slot, names, _pick_texts(own[key]))
        if {"null"} & set(map(str, own[key].get("type", ()))):
            named["anyOf"].append({"type": "null"})
        parts = {name: self._describe_part(slot, name) for name in names}
        taken = {name for part in parts.values() for name in part.parameters}
        # `every` of the schedule `step` has other values than `every` of all schedules.
        shared = {name: schema for name, schema in own.items() if name not in taken} | {key: named}
        mapping = describe_mapping(shared)
        del mapping["additionalProperties"]
        mapping["allOf"] = [
            {
                "if": {"properties": {key: {"const": name}}, "required": [key]},
                "then": part.close(own),
            }
            for name, part in parts.items()
        ]
        unnamed = unite_parts(list(parts.values())).close(own)
        mapping["allOf"].append({"if": {"required": [key]}, "else": unnamed})
        return mapping

    def _describe_part(self, slot: PartLocation, name: str) -> PartSchema:
        return describe_part(slot, name, self._describe_nested)

    def _unite(self, slot: PartLocation) -> PartSchema:
        return unite_parts([self._describe_part(slot, name) for name in self._list_names(slot)])

    def _describe_nested(self, slot: PartLocation, name: str, parameter: str) -> JsonSchema | None:
        """Return the schema of a parameter that holds other parts, or None."""
        for inner in self._slots:
            names = inner.path.removeprefix(f"{slot.path}.").split(".")
            if inner.only == (slot.path, name) and names[0].removesuffix("[]") == parameter:
                return self._nest(inner, names)
        return None

    def _nest(self, inner: PartLocation, names: Sequence[str]) -> JsonSchema:
        """Return the schema of a value in which a place is found by labels, lists and keys."""
        first, *rest = names
        if not rest:
            schema = self._refer_to(inner)
        elif rest == ["*"]:
            schema = self._define(inner.path.removesuffix(".*"), self._describe_labels(inner, {}))
        else:
            below = {rest[0].removesuffix("[]"): self._nest(inner, rest)}
            schema = {"type": "object", "properties": below}
        if first.endswith("[]"):
            return {**_LIST, "items": schema}
        return schema

    def _list_names(self, slot: PartLocation) -> list[str]:
        return list(dict.fromkeys([*slot.registry.names(), *self._extra.get(slot.path, ())]))

    def _list_own(self, slot: PartLocation) -> list[str]:
        return [slot.key, *slot.own_keys, *slot.other_keys]

    def _find_slot(self, path: str) -> PartLocation | None:
        return next(
            (slot for slot in self._slots if slot.only is None and matches(path, slot.path)), None
        )

    def _define(self, name: str, schema: JsonSchema) -> JsonSchema:
        self.definitions[_escape(name)] = schema
        return {"$ref": _reference(name)}


_LIST: Mapping[str, Any] = {"type": ["array", "string"], "pattern": OPEN}


def describe_mapping(properties: Mapping[str, JsonSchema]) -> JsonSchema:
    """Return the schema of a mapping with known keys."""
    return {
        "type": ["object", "string"],
        "pattern": OPEN,
        "patternErrorMessage": "expected a mapping",
        "properties": dict(properties),
        "additionalProperties": False,
    }


def _pick_texts(schema: JsonSchema) -> JsonSchema:
    wanted = ("description", "markdownDescription", "default")
    return {name: schema[name] for name in wanted if name in schema}


def _escape(name: str) -> str:
    """Return a name that needs no escape in a reference."""
    return name.replace("[]", "-item").replace("*", "any").replace(" ", "-")


def _reference(name: str) -> str:
    return f"#/definitions/{_escape(name)}"
