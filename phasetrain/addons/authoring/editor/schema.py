"""The command `phasetrain schema`: a JSON Schema of experiment files, for editors.

It is made from the definitions of the keys and from the registries, so it also has the parts that
the modules of RUN.imports register. Draft 7 is the draft that all editors know.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from phasetrain.addons.authoring.code_cache import compute_once
from phasetrain.addons.authoring.editor.value_schemas import JsonSchema
from phasetrain.app.slots import list_slots
from phasetrain.config.addons import list_parts
from phasetrain.config.compose.composed import Composed, compose
from phasetrain.config.compose.folders import EXPERIMENT, find_config_dir
from phasetrain.config.compose.merge import lookup
from phasetrain.config.compose.sources import ConfigFiles
from phasetrain.config.plugins import load_plugins
from phasetrain.config.problems import raise_all
from phasetrain.config.schema import default_schema
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
    names = find_part_names(composed, list_slots(), default_schema())
    others = {
        slot.path: [name for name in names[slot.path] if name not in list_parts(slot.kind)]
        for slot in list_slots()
    }
    if has_custom_parts(composed) or any(others.values()):
        sections = _describe_sections(others)
    else:
        sections = compute_once("schema", lambda: _describe_sections({}))
    root, definitions = sections["root"], sections["definitions"]
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


def _describe_sections(names: Mapping[str, Iterable[str]]) -> dict[str, JsonSchema]:
    # Imports all parts, and with them torch.
    from phasetrain.addons.authoring.editor.sections import describe_sections

    return describe_sections(names)


def has_custom_parts(composed: Composed) -> bool:
    """Return whether a config imports modules, which may register parts."""
    return bool(lookup(composed.config, "RUN.imports"))


def import_parts(overrides: Sequence[str], config_dir: str | None) -> Composed:
    """Register the parts of installed packages and of RUN.imports, and return the config.

    Raises:
        ConfigError: an override or a module of RUN.imports is wrong.
    """
    load_plugins()
    composed = compose(overrides, config_dir=find_config_dir(config_dir, overrides))
    if has_custom_parts(composed):
        from phasetrain.app.setup import import_modules

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
