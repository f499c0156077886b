"""JSON Schema of all sections of the config, with their parts."""

from collections.abc import Iterable, Mapping
from typing import Any

from phasetrain.addons.authoring.editor.schema_builder import SPLIT, SchemaBuilder, describe_mapping
from phasetrain.addons.authoring.editor.texts import value_texts
from phasetrain.addons.authoring.editor.value_schemas import JsonSchema, describe_values
from phasetrain.app.slots import list_slots
from phasetrain.config.sections.extended import complete_config
from phasetrain.config.stages import CHANGES, LENGTHS


def describe_sections(names: Mapping[str, Iterable[str]]) -> dict[str, JsonSchema]:
    """Return the schema of the whole config as `root`, and the `definitions` that it refers to.

    Args:
        names: path of a slot -> names of parts in addition to the names in its registry.
    """
    builder = SchemaBuilder(list_slots(), names)
    root = builder.add_section(complete_config(), "")
    definitions = builder.definitions
    # The only section that is one key, and so has no definition yet.
    definitions["METERS"] = root["properties"]["METERS"]
    root["properties"]["METERS"] = {"$ref": "#/definitions/METERS"}
    # Last, since stages refer to keys of all sections.
    definitions["PHASES"]["properties"]["stages"]["items"] = _describe_stage(builder)
    return {"root": root, "definitions": definitions}


def _describe_stage(builder: SchemaBuilder) -> JsonSchema:
    """Return the schema of an entry of PHASES.stages: a length, and the keys that it may change."""
    properties: dict[str, Any] = {
        "name": {"type": "string", "description": "name of the stage, for the log"}
    }
    length = describe_values(int | None, {"ge": 1}).to_schema("int >= 1")
    for name in LENGTHS:
        text = f"length of the stage in {name}; one of {', '.join(LENGTHS)} is set"
        about = value_texts(text, "int >= 1", "", "adjustable", "PHASES.stages")
        properties[name] = {**length, **about}
    tree: dict[str, Any] = {}
    for path in _list_changes(builder.properties):
        *above, last = path.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = builder.properties[path]
    for section, below in tree.items():
        properties[section] = below
        if section == "DATA":
            splits = {name: describe_mapping(keys) for name, keys in below.items()}
            properties[section] = {
                **describe_mapping(splits),
                "patternProperties": {SPLIT: splits["TEST"]},
            }
        elif section not in CHANGES:
            properties[section] = describe_mapping(below)
    return describe_mapping(properties)


def _list_changes(paths: Iterable[str]) -> list[str]:
    """Return the paths of CHANGES, with DATA.TRAIN and DATA.TEST for all splits."""
    changes = [path.replace("*", split) for path in CHANGES for split in ("TRAIN", "TEST")]
    return [path for path in dict.fromkeys(changes) if path in paths]
