"""The sections of the core with the sections and keys of the installed add-ons."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from phasetrain.config.addons import import_object, load_addons, make_conflict_error
from phasetrain.config.engines import list_engines
from phasetrain.config.sections import ENTRIES, Config
from phasetrain.config.sections.keys import group, own_keys


@cache
def complete_config() -> type[Config]:
    """Return the dataclass whose fields are all sections.

    Raises:
        ConfigError: an add-on adds a section or a key that is there already.
    """
    own = {definition.name for definition in fields(Config)}
    added = {}
    for addon in load_addons():
        for name, path in addon.sections.items():
            if name in own:
                raise make_conflict_error(addon, f"the section {name!r}")
            added[name] = import_object(path)
    extended = {
        definition.name: _extend_section(definition.name, definition.metadata["group"])
        for definition in fields(Config)
        if "group" in definition.metadata
    }
    sections = extended | added
    body: dict[str, Any] = {name: group(section) for name, section in sections.items()}
    body["__annotations__"] = sections
    body["__doc__"] = Config.__doc__
    return _make_dataclass("Config", (Config,), body)


@cache
def complete_entries() -> Mapping[str, type]:
    """Return the own keys of all entries by path, from the core and from add-ons."""
    added = {
        slot.path: import_object(slot.section)
        for addon in load_addons()
        for slot in addon.slots
        if slot.section
    }
    return {**ENTRIES, **added}


def _extend_section(name: str, section: type) -> type:
    """Return a section of the core with the keys that add-ons add to it."""
    taken = set(own_keys(section))
    added = []
    for addon in load_addons():
        for path in addon.keys.get(name, ()):
            keys = import_object(path)
            for key in own_keys(keys) & taken:
                raise make_conflict_error(addon, f"the key {name}.{key}")
            taken |= own_keys(keys)
            added.append(keys)
    body: dict[str, Any] = {"__doc__": section.__doc__, "__annotations__": {}}
    if name == "RUN":
        engines = tuple(list_engines())
        body["__annotations__"]["engine"] = Literal[engines]
        body["engine"] = copy(
            next(definition for definition in fields(section) if definition.name == "engine")
        )
    elif not added:
        return section
    return _make_dataclass(section.__name__, (*reversed(added), section), body)


def _make_dataclass(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    made: type = dataclass(frozen=True, kw_only=True)(type(name, bases, body))
    return made
