"""Selects names of parameters, modules and the like by patterns with wildcards."""

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first

LISTED_NAMES = 6
"""Number of names in an error."""


def as_list(value: str | Sequence[str]) -> list[str]:
    """Return one pattern or several as a list."""
    if isinstance(value, str):
        return [value]
    return list(value)


def match_names(
    pattern: str, names: Collection[str], otherwise: str, *, code: str = "config.no_match"
) -> list[str]:
    """Return the names that a pattern matches, in their order.

    Args:
        pattern: a whole name, in which `*`, `?` and `[...]` are wildcards.
        names: all names.
        otherwise: beginning of the error if there is none, without the full stop.
        code: code of this error.

    Raises:
        ConfigError: the pattern matches no name.
    """
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        raise ConfigError(
            f"{otherwise}{did_you_mean(pattern, names) or '.'} "
            f"There are {join_first(names, LISTED_NAMES)}",
            code=code,
        )
    return matches


def filter_names(
    names: Collection[str],
    include: Sequence[str],
    exclude: Sequence[str],
    describe: Callable[[str, int, str], str],
    *,
    code: str = "config.no_match",
) -> list[str]:
    """Return the names that a pattern of `include` matches and none of `exclude`, in their order.

    Args:
        names: all names.
        include: patterns; none: include all names.
        exclude: patterns.
        describe: returns the beginning of the error from `include` or `exclude`, and the number in
            it and the text of a pattern that matches no name.
        code: code of this error.

    Raises:
        ConfigError: a pattern matches no name.
    """

    def match_any(key: str, patterns: Sequence[str]) -> set[str]:
        return {
            name
            for number, pattern in enumerate(patterns)
            for name in match_names(pattern, names, describe(key, number, pattern), code=code)
        }

    included = match_any("include", include) if include else set(names)
    excluded = match_any("exclude", exclude)
    return [name for name in names if name in included and name not in excluded]


def match_modules(
    pattern: str, modules: Mapping[str, object], otherwise: str, *, code: str = "config.no_match"
) -> list[str]:
    """Return the names of the modules whose name or class a pattern matches, in their order.

    Args:
        pattern: a whole name of a module or of a class, in which `*`, `?` and `[...]` are
            wildcards.
        modules: name -> module.
        otherwise: beginning of the error if there is none, without the full stop.
        code: code of this error.

    Raises:
        ConfigError: the pattern matches no name and no class.
    """
    classes = {name: type(module).__name__ for name, module in modules.items()}
    matches = [
        name
        for name, class_name in classes.items()
        if fnmatchcase(name, pattern) or fnmatchcase(class_name, pattern)
    ]
    if not matches:
        kinds = list(dict.fromkeys(classes.values()))
        near = did_you_mean(pattern, [*modules, *kinds]) or "."
        raise ConfigError(
            f"{otherwise}{near} Names: {join_first(modules, LISTED_NAMES)}; "
            f"classes: {', '.join(kinds) or 'none'}",
            code=code,
        )
    return matches
