"""Resolve the interpolations of a merged config, `${SECTION.key}` and `${oc.env:NAME}`."""

import re
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from phasetrain.config.compose.library_errors import explain_interpolation_error
from phasetrain.config.compose.merge import Merged, lookup
from phasetrain.config.nested import leaves
from phasetrain.config.problems import format_value
from phasetrain.config.suggestions import KnownPaths
from phasetrain.errors import Problem

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def resolve_interpolations(
    merged: Merged, run_name: str, *, known_keys: Iterable[str], literal: str | None = None
) -> list[Problem]:
    """Resolve interpolations, `${...}`; report those that cannot be resolved, and missing values,
    `???`.

    Args:
        merged: all layers.
        run_name: value of RUN.name if no layer sets it.
        known_keys: dotted paths to suggest for a misspelt one.
        literal: name of a layer whose texts are not resolved: its config was resolved when it was
            stored, and `${oc.env:...}` in a folder from elsewhere would read this environment.
    """
    problems = [
        Problem.from_message(
            f"{path} = ??? ({merged.origins[path]}): a value must be given, as in {path}=...",
            "config.missing_value",
            path,
        )
        for path, value in leaves(merged.values).items()
        if value == "???"
    ]
    wanted = [
        path
        for path, value in leaves(merged.values).items()
        if "${" in str(value) and merged.origins[path] != literal
    ]
    # Most configs have no interpolation, and need not pay for building OmegaConf's tree.
    if not wanted:
        return problems
    unreadable = {path: reason for path in wanted if (reason := _check_grammar(merged.get(path)))}
    if unreadable:
        # OmegaConf builds no tree with such a text in it.
        return [*problems, *(_make_problem(merged, *entry) for entry in unreadable.items())]
    tree = OmegaConf.create(merged.values)
    # Derived values do not exist yet; this one is known.
    if lookup(merged.values, "RUN.name") is None:
        OmegaConf.update(tree, "RUN.name", run_name)
    paths = KnownPaths([*known_keys, *merged.origins])
    for path in wanted:
        if null := _find_null(tree, merged.get(path)):
            reason = f"{null} is null, or derived later; set {null}"
            problems.append(_make_problem(merged, path, reason))
            continue
        try:
            resolved = _resolve_path(tree, path)
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            reason = explain_interpolation_error(error, paths.near)
            problems.append(_make_problem(merged, path, reason))
            continue
        merged.replace(path, resolved)
    return problems


def _resolve_path(tree: Any, path: str) -> Any:
    parent_path, _, name = path.rpartition(".")
    parent: Any = OmegaConf.select(tree, parent_path) if parent_path else tree
    value = parent[name]
    # An interpolation may name a whole section.
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _make_problem(merged: Merged, path: str, reason: str) -> Problem:
    layer = merged.origins[path]
    message = f"{path} = {format_value(merged.get(path))} ({layer}): {reason}"
    return Problem.from_message(message, "config.interpolation", path)


def _check_grammar(given: Any) -> str:
    """Return why a text is no interpolation that OmegaConf can read, or an empty text."""
    try:
        OmegaConf.create({"given": given})
    except GrammarParseError as error:
        return explain_interpolation_error(error, lambda _: None)
    return ""


def _find_null(tree: Any, given: Any) -> str:
    """Return the null key that a text embeds, as in `a/${RUN.dir}`, or an empty text."""
    # A text that is one reference may be null on purpose.
    if not isinstance(given, str) or _REFERENCE.fullmatch(given):
        return ""
    for key in _REFERENCE.findall(given):
        try:
            is_null = OmegaConf.select(tree, key, default="") is None
        except OmegaConfBaseException:
            continue  # reported when the text is resolved
        if is_null:
            return str(key)
    return ""
