"""Compose the config: merge all layers, and collect all mistakes.

Layers, lowest first: `defaults.yaml`; the files of the experiment's defaults list in Hydra's order,
and the experiment itself at `_self_` of its list (by default last); options selected on the command
line (`LOSS=focal`), which take precedence over the experiment; values of the command line.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from phasetrain.config.compose.folders import EXPERIMENT
from phasetrain.config.compose.library_errors import explain_interpolation_error
from phasetrain.config.compose.merge import Merged, lookup
from phasetrain.config.compose.overrides import CommandLine, read_overrides
from phasetrain.config.compose.sources import ConfigFiles, Layer
from phasetrain.config.deprecations import rename_keys, rename_path
from phasetrain.config.nested import leaves
from phasetrain.config.problems import format_value
from phasetrain.config.schema import DEFAULTS, PARTS, Schema, default_schema
from phasetrain.config.suggestions import KnownPaths
from phasetrain.errors import Problem, did_you_mean

COMMAND_LINE = "command line"
_NOT_IN_NAME = re.compile(r"[^\w.+-]")

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Composed:
    """A config before validation.

    Attributes:
        config: nested plain dicts and lists, interpolations resolved.
        origins: dotted path of each leaf -> the layer that set it last: `defaults.yaml`,
            `LOSS/focal.yaml`, the path of a user's file, or `command line`.
        layers: names of the layers, lowest first.
        notes: lines about parameters that were dropped because a layer named another part.
        problems: mistakes in files and overrides.
        experiment: name of the experiment, or of its file without the suffix; empty for
            `experiment=null`.
        overrides: the overrides as given.
        assumed: names of the layers that apply because nothing was given: the defaults, and the
            files of the default experiment.
        changes: values of each layer above `base`, see `compose`; empty without a base.
        deprecated: one sentence per old name that the user gave.
    """

    config: dict[str, Any]
    origins: Mapping[str, str]
    layers: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    experiment: str
    overrides: tuple[str, ...]
    assumed: frozenset[str] = frozenset({DEFAULTS})
    changes: tuple[Mapping[str, Any], ...] = ()
    deprecated: tuple[str, ...] = ()


def compose(
    overrides: Sequence[str],
    *,
    config_dir: str | Path | None = None,
    schema: Schema | None = None,
    base: Layer | None = None,
) -> Composed:
    """Merge defaults, files and overrides; mistakes are collected in `problems`, none is raised.

    Args:
        overrides: overrides such as `LOSS=focal` or `OPTIMIZER.lr=0.1`.
        config_dir: a folder with more options, laid out as `configs/`.
        schema: the keys and their defaults; by default all keys of phasetrain.
        base: a complete config in the place of an experiment, such as the config of a run folder;
            its texts are taken literally.
    """
    schema = schema or default_schema()
    files = ConfigFiles(config_dir)
    line = read_overrides(overrides, files, schema)
    # No file, but the defaults in the sections: a file could contradict them.
    default = Layer(DEFAULTS, schema.defaults)
    layers = [default]
    assumed = {default.name}
    if base is None:
        experiment = _select_experiment(files, line)
        layers += experiment
        if not line.named_by:
            assumed |= {layer.name for layer in experiment}
    else:
        layers.append(_without_defaults(base, schema))
        line.problems += _reject_experiment(line, base)
        line.experiment = None
    layers += _select_options(files, line)
    deprecated = _rename_keys(layers, line, base)
    merged = Merged(schema)
    for layer in layers:
        merged.apply(layer)
        if base is not None and layer.name == base.name:
            merged.notes.clear()  # its parts replace the default ones, which nobody asked for
    # Removals come before the values of the command line, so that `~A.b A.c=1` keeps A.c.
    problems = [
        *files.problems,
        *line.problems,
        *_find_dotted_keys([*layers, Layer(COMMAND_LINE, line.values)]),
        *_remove(merged, line, default),
    ]
    merged.apply(Layer(COMMAND_LINE, line.values))
    merged.drop_assumed_datasets(assumed)
    merged.finish(default)
    name = line.file.stem if line.file else line.experiment or ""
    # Last, so that interpolations see the values of the highest layer.
    literal = base.name if base is not None else None
    problems += resolve_interpolations(
        merged, default_run_name(name), known_keys=schema.keys, literal=literal
    )
    return Composed(
        config=merged.values,
        origins=merged.origins,
        layers=(*(layer.name for layer in layers), COMMAND_LINE),
        notes=tuple(merged.notes),
        problems=tuple(problems),
        experiment=name,
        overrides=tuple(overrides),
        assumed=frozenset(assumed),
        changes=(*(layer.values for layer in layers[2:]), line.values) if base is not None else (),
        deprecated=deprecated,
    )


def _rename_keys(layers: list[Layer], line: CommandLine, base: Layer | None) -> tuple[str, ...]:
    """Replace old names in the layers and the overrides, and return a sentence for each."""
    used = []
    for index, layer in enumerate(layers):
        values, deprecations = rename_keys(layer.values)
        layers[index] = Layer(layer.name, values)
        # The config of a run folder is a record, which nobody has to change.
        if base is None or layer.name != base.name:
            used += deprecations
    line.values, deprecations = rename_keys(line.values)
    line.removals = [(rename_path(path), value) for path, value in line.removals]
    return tuple(dict.fromkeys(entry.warning for entry in [*used, *deprecations]))


def _without_defaults(base: Layer, schema: Schema) -> Layer:
    """Return a complete config as a layer that also removes the hooks, meters and splits of the
    defaults that it does not have."""
    values = dict(base.values)
    for section in ("DATA", "METERS", "HOOKS"):
        own = values.get(section) or {}
        absent = dict.fromkeys(schema.defaults.get(section) or {}, None)
        values[section] = {**{key: value for key, value in absent.items() if key not in own}, **own}
    return Layer(base.name, values)


def _reject_experiment(line: CommandLine, base: Layer) -> list[Problem]:
    if not line.named_by:
        return []
    message = (
        f"{line.named_by}: the config is that of {base.name}; expected "
        "changes of it, as in SECTION.key=value or SECTION=GROUP"
    )
    return [Problem.from_message(message, "config.conflict", EXPERIMENT)]


def _select_experiment(files: ConfigFiles, line: CommandLine) -> list[Layer]:
    # Without `replaced`, keys of the file that a defaults list names would remain below the
    # selected one.
    replaced = tuple(line.groups)
    if line.file is not None:
        return files.select_file(line.file, replaced=replaced)
    if not line.experiment:
        return []
    return files.select(EXPERIMENT, line.experiment, replaced=replaced)


def _select_options(files: ConfigFiles, line: CommandLine) -> list[Layer]:
    layers: list[Layer] = []
    for group, options in line.groups.items():
        named = {}
        for option in options:
            selected = files.select(group, option, replaced=tuple(line.groups))
            layers += selected
            names = [_find_part_name(layer, group) for layer in selected]
            named[option] = next(filter(None, reversed(names)), None)
        line.problems += _reject_several_parts(group, named)
    return layers


def _find_part_name(layer: Layer, group: str) -> str | None:
    """Return the part that a layer names in the section of a group; None without one."""
    section = group.replace("/", ".")
    name: str | None = lookup(layer.values, f"{section}.{PARTS.get(section, 'name')}")
    return name


def _reject_several_parts(group: str, named: Mapping[str, str | None]) -> list[Problem]:
    """Reject several options of a group that each name a part: the last would win."""
    naming = [option for option, name in named.items() if name is not None]
    if len(naming) < 2:
        return []
    options = ",".join(naming)
    message = (
        f"{group}=[{','.join(named)}]: {' and '.join(naming)} name a part each, and {group} has "
        f"one; choose one of them, or train with each: phasetrain sweep {group}={options}"
    )
    return [Problem.from_message(message, "config.several_parts", group)]


def _remove(merged: Merged, line: CommandLine, default: Layer) -> list[Problem]:
    problems = []
    for path, value in line.removals:
        current = lookup(merged.values, path)
        if value is not None and value != current:
            message = f"~{path}={value}: the value is {current!r}, so nothing is removed"
            problems.append(Problem.from_message(message, "config.override", path))
        elif not merged.remove(path, default):
            near = did_you_mean(path, merged.origins)
            message = f"~{path}: nothing is set there{near}"
            problems.append(Problem.from_message(message, "config.unknown_key", path))
    return problems


def _find_dotted_keys(layers: Sequence[Layer]) -> list[Problem]:
    problems = []
    # YAML reads `OPTIMIZER.lr: 0.1` as one key with a dot, which no code would ever look up.
    for layer in layers:
        for path in _list_keys_with_dots(layer.values):
            message = (
                f"{path} ({layer.name}): a key with a dot; in files keys are nested, as in "
                f"`{_write_nested(path)}`"
            )
            problems.append(Problem.from_message(message, "config.dotted_key", path))
    return problems


def _list_keys_with_dots(values: Mapping[Any, Any]) -> list[str]:
    keys = []
    for key, value in values.items():
        if "." in str(key):
            keys.append(str(key))
        if isinstance(value, Mapping):
            keys += _list_keys_with_dots(value)
    return keys


def _write_nested(path: str) -> str:
    *parents, last = path.split(".")
    return "".join(f"{name}: {{" for name in parents) + f"{last}: ..." + "}" * len(parents)


def default_run_name(experiment: str) -> str:
    """Return RUN.name of a run of an experiment: its name, without characters that a shell or a
    file system would not take."""
    return _NOT_IN_NAME.sub("-", experiment) or "run"


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
