"""The command `phasetrain schema`: a JSON Schema of experiment files, for editors.

It is made from the definitions of the keys and from the registries, so it also has the parts that
the modules of RUN.imports register. Draft 7 is the draft that all editors know.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from phasetrain.addons.authoring.editor.schema_builder import SPLIT, SchemaBuilder, describe_mapping
from phasetrain.addons.authoring.editor.texts import value_texts
from phasetrain.addons.authoring.editor.value_schemas import JsonSchema, describe_values
from phasetrain.app.setup import SLOTS, import_modules
from phasetrain.config.compose.composed import Composed, compose
from phasetrain.config.compose.folders import EXPERIMENT, find_config_dir
from phasetrain.config.compose.sources import ConfigFiles
from phasetrain.config.plugins import load_plugins
from phasetrain.config.problems import raise_all
from phasetrain.config.schema import default_schema
from phasetrain.config.sections.extended import complete_config
from phasetrain.config.stages import CHANGES, LENGTHS
from phasetrain.config.validation import find_part_names
from phasetrain.errors import ConfigError, did_you_mean

DRAFT = "http://json-schema.org/draft-07/schema#"


def make_schema(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, group: str | None = None
) -> JsonSchema:
    """Return the JSON Schema of experiment files.

    Args:
        overrides: overrides as on the command line. The modules of RUN.imports register their
            parts, and a dotted path in the config becomes a known name.
        config_dir: folder with the user's configs.
        group: section or group of keys, such as `OPTIMIZER` or `DATA.TRAIN`: the schema is for the
            files of its folder instead of experiments.

    Raises:
        ConfigError: an override or a module of RUN.imports is wrong, a part of the config cannot
            be loaded, or there is no such group.
    """
    composed = import_parts(overrides, config_dir)
    builder = SchemaBuilder(SLOTS, find_part_names(composed, SLOTS, default_schema()))
    root = builder.add_section(complete_config(), "")
    definitions = builder.definitions
    # The only section that is one key, and so has no definition yet.
    definitions["METERS"] = root["properties"]["METERS"]
    root["properties"]["METERS"] = {"$ref": "#/definitions/METERS"}
    # Last, since stages refer to keys of all sections.
    definitions["PHASES"]["properties"]["stages"]["items"] = _describe_stage(builder)
    definitions["defaults"] = _describe_defaults(
        ConfigFiles(find_config_dir(config_dir, overrides))
    )
    if group is not None:
        root = _pick_group(definitions, group)
    properties = {**root["properties"], "defaults": {"$ref": "#/definitions/defaults"}}
    return {
        "$schema": DRAFT,
        **root,
        # A file is not an interpolation.
        "type": "object",
        "properties": properties,
        "definitions": dict(sorted(definitions.items())),
    }


def import_parts(overrides: Sequence[str], config_dir: str | None) -> Composed:
    """Register the parts of installed packages and of RUN.imports, and return the config.

    Raises:
        ConfigError: an override or a module of RUN.imports is wrong.
    """
    load_plugins()
    composed = compose(overrides, config_dir=find_config_dir(config_dir, overrides))
    composed = import_modules(composed, None)
    # An experiment may leave values to the command line.
    raise_all(problem for problem in composed.problems if problem.code != "config.missing_value")
    return composed


def write_schema(schema: JsonSchema, path: str | Path) -> None:
    """Write a schema to a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        # Without line breaks: it is for programs, and a quarter smaller.
        Path(path).write_text(json.dumps(schema) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {path}: {error.strerror}; expected a file that can be written",
            code="file.not_writable",
        ) from error


def _pick_group(definitions: dict[str, JsonSchema], group: str) -> JsonSchema:
    name = group.replace("/", ".")
    if name not in definitions or not (name.isupper() or "." in name):
        sections = [section for section in definitions if section.isupper()]
        near = did_you_mean(name, sections) or "."
        raise ConfigError(
            f"--group {group}: no section has this name{near} Known: {', '.join(sections)}",
            code="config.unknown_section",
        )
    definition = dict(definitions[name])
    # Each branch of a part has the list of all keys that a file of the group may have.
    if "allOf" in definition:
        definition["allOf"] = [_allow_defaults(branch) for branch in definition["allOf"]]
    return definition


def _allow_defaults(branch: JsonSchema) -> JsonSchema:
    return {
        word: {**subschema, "properties": {"defaults": True, **subschema["properties"]}}
        if word in ("then", "else")
        else subschema
        for word, subschema in branch.items()
    }


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


def _describe_defaults(files: ConfigFiles) -> JsonSchema:
    """Return the schema of a defaults list: experiments, files next to this one, and files of
    groups."""
    option = ["string", "array", "null"]
    groups: dict[str, JsonSchema] = {}
    for group in files.groups():
        value = {"anyOf": [{"enum": files.options(group)}, {"type": option}]}
        groups |= dict.fromkeys((f"/{group}", f"override /{group}"), value)
    names = {"enum": ["_self_", *files.options(EXPERIMENT)]}
    entry = {
        "type": "object",
        "properties": groups,
        "additionalProperties": {"type": option},
        "maxProperties": 1,
    }
    return {
        "type": "array",
        "items": {"anyOf": [names, {"type": "string"}, entry]},
        "description": "files that this one starts from, in order; `_self_` is this file, whose "
        "keys override the files before it",
    }
