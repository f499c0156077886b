"""Sections and keys in the config of a run folder whose add-ons are not installed here."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phasetrain.app.stored.stored_config import StoredConfig
from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import lookup
from phasetrain.config.deprecations import rename_path
from phasetrain.config.schema import Schema
from phasetrain.hooks import HOOKS

log = logging.getLogger(__name__)


def remove_unknown_keys(config: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return a recorded config without the sections and the keys of RUN that neither the core nor
    an installed add-on has."""
    unknown = _list_unknown_keys(config, schema)
    kept = {name: value for name, value in config.items() if name not in unknown}
    if "RUN" in config:  # a packed model has no such section
        kept["RUN"] = {
            name: value for name, value in config["RUN"].items() if f"RUN.{name}" not in unknown
        }
    return kept


def _list_unknown_keys(config: Mapping[str, Any], schema: Schema) -> list[str]:
    paths = [*config, *(f"RUN.{name}" for name in config.get("RUN", {}))]
    return [path for path in paths if not schema.has(rename_path(path))]


def ignore_leftovers(composed: Composed, stored: StoredConfig, schema: Schema) -> Composed:
    """Return the config of a run folder without the hooks that no installed add-on has, and log a
    line that names them and the unknown keys.

    Only hooks without parameters are ignored, as those that are on by default. If such a hook did
    more than observe the run, the resume from a checkpoint rejects the change.

    Args:
        composed: config of the folder with changes; its imports have registered their parts.
        stored: the folder.
        schema: the keys.
    """
    hooks = [
        f"HOOKS.{label}"
        for label, parameters in stored.values.get("HOOKS", {}).items()
        if parameters == {} and label not in HOOKS
    ]
    # What the user sets is a mistake.
    hooks = [
        hook for hook in hooks if all(lookup(changes, hook) is None for changes in composed.changes)
    ]
    _warn_of([*_list_unknown_keys(stored.values, schema), *hooks], stored.path)
    if not hooks:
        return composed
    kept = {
        label: value
        for label, value in composed.config["HOOKS"].items()
        if f"HOOKS.{label}" not in hooks
    }
    return replace(composed, config={**composed.config, "HOOKS": kept})


def warn_of_unknown_keys(config: Mapping[str, Any], schema: Schema, path: str) -> None:
    """Log a line that names the sections and the keys of RUN which `remove_unknown_keys` removes.

    Args:
        config: a recorded config.
        schema: the keys.
        path: folder or checkpoint of the config.
    """
    _warn_of(_list_unknown_keys(config, schema), path)


def _warn_of(ignored: Sequence[str], path: str) -> None:
    if ignored:
        log.warning(
            "%s: ignored, since no installed add-on knows them: %s", path, ", ".join(ignored)
        )
