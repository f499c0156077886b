"""The sections of the core with the sections and keys of the installed add-ons."""

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from phasetrain.config.addons import import_object, load_addons
from phasetrain.config.engines import list_engines
from phasetrain.config.sections import Config
from phasetrain.config.sections.keys import group, own_keys
from phasetrain.errors import ConfigError


@cache
def complete_config() -> type[Config]:
    """Return the dataclass whose fields are all sections."""
    paths = [item for addon in load_addons() for item in addon.sections.items()]
    _reject_taken(
        "section",
        [*(definition.name for definition in fields(Config)), *(name for name, _ in paths)],
    )
    added = {name: import_object(path) for name, path in paths}
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


def _extend_section(name: str, section: type) -> type:
    """Return a section of the core with the keys that add-ons add to it."""
    added = [import_object(path) for addon in load_addons() for path in addon.keys.get(name, ())]
    _reject_taken(f"key of {name}", [key for keys in (section, *added) for key in own_keys(keys)])
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


def _reject_taken(thing: str, names: Sequence[str]) -> None:
    """Reject names that are there twice.

    Raises:
        ConfigError: an add-on adds what is there already.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"the {thing} {name!r} is added by an installed add-on, and there is one already; "
                "uninstall the add-on",
                code="addon.conflict",
            )
