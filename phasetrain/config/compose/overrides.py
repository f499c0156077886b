"""Parse overrides: `SECTION=GROUP` selects a file, `A.b=c` sets a value, `~A.b` removes one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from phasetrain.config.compose.folders import EXPERIMENT, is_file_word
from phasetrain.config.compose.library_errors import explain_override_error, find_unclosed
from phasetrain.config.compose.sources import ConfigFiles
from phasetrain.config.schema import LABELLED, WORDS, Schema, part_pattern
from phasetrain.errors import Problem, did_you_mean, nearest

DEFAULT_EXPERIMENT = "digits"

MOST_SEEDS = 10_000
"""Largest number of seeds in one override; a larger one is a typing error."""

SEEDS = "seeds"


@dataclass
class CommandLine:
    """The overrides, grouped by kind.

    Attributes:
        experiment: the selected experiment, None for `experiment=null`.
        file: an experiment file that was given by its path instead.
        named_by: the override that selects it, or excludes any; empty if there is none.
        groups: group -> the options selected from it, in order.
        values: nested mapping of the values that are set.
        removals: dotted paths and values of `~path=value`, to be removed from lower layers.
        problems: overrides that cannot be used.
    """

    experiment: str | None = DEFAULT_EXPERIMENT
    file: Path | None = None
    named_by: str = ""
    groups: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    removals: list[tuple[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_overrides(overrides: Sequence[str], files: ConfigFiles, schema: Schema) -> CommandLine:
    """Parse overrides with Hydra's grammar, one by one, so that all invalid ones are reported."""
    line = CommandLine()
    parser = make_override_parser()
    words = list(overrides)
    while words:
        text = words.pop(0)
        if parts := _take_split_value(text, words):
            line.problems.append(_make_split_problem([text, *parts]))
            continue
        if is_file_word(text):
            _Reader(line, files, schema).read_file(text)
            continue
        # One by one, since the parser stops at the first mistake of a list.
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            line.problems.append(_unreadable(text, error))
        else:
            _Reader(line, files, schema).read(override)
    return line


class _Reader:
    """Adds parsed overrides to the command line."""

    def __init__(self, line: CommandLine, files: ConfigFiles, schema: Schema) -> None:
        self._line = line
        self._files = files
        self._schema = schema

    def read(self, override: Override) -> None:
        text = str(override.input_line)
        key = override.key_or_group
        rejection = _reject(text, override)
        if rejection:
            self._add_problem(rejection, key)
        elif override.is_delete():
            self._remove(key, override.value())
        elif override.value() == "" and self._selects(key):
            message = (
                f"{text}: expected the name of a file; {EXPERIMENT}=null selects no experiment"
            )
            self._add_problem(message, key, "config.unknown_file")
        elif _is_options(override.value()) and "." not in key and self._selects(key):
            options = override.value()
            chosen = options if isinstance(options, list) else [options]
            self._select(key, [str(option) for option in chosen])
        elif key == EXPERIMENT and override.value() is None:
            self._name_experiment(text, None)
        elif "/" in key:
            self._add_problem(f"{text}: there is no folder {key} with options", key)
        else:
            self._set_value(key, override)

    def read_file(self, text: str) -> None:
        """Select an experiment file by its path."""
        path = Path(text)
        if path.suffix == ".yml":
            self._add_problem(f"{text}: expected a file *.yaml; rename it", EXPERIMENT)
            return
        if not path.is_file():
            # Without the suffix, which all of them share.
            stems = [Path(name).stem for name in _list_files(path.parent)]
            near = "."
            if stem := nearest(path.stem, stems):
                near = f"; did you mean '{path.with_stem(stem)}'?"
            message = f"{text}: there is no such file{near}"
            self._add_problem(message, EXPERIMENT, "config.unknown_file")
            return
        name = self._files.name_of(path)
        self._name_experiment(text, name, None if name else path)

    def _name_experiment(self, word: str, name: str | None, file: Path | None = None) -> None:
        earlier = self._line.named_by
        if earlier not in ("", word) and (is_file_word(earlier) or is_file_word(word)):
            message = (
                f"{earlier} and {word}: a run has one experiment, so {earlier} would count for "
                "nothing; leave one out. A file includes only what its defaults list names"
            )
            self._add_problem(message, EXPERIMENT, "config.conflict")
        self._line.named_by = word
        self._line.experiment = name
        self._line.file = file

    def _add_problem(self, message: str, key: str, code: str = "config.override") -> None:
        self._line.problems.append(Problem.from_message(message, code, key))

    def _selects(self, key: str) -> bool:
        return key == EXPERIMENT or key in self._schema.sections or self._files.is_group(key)

    def _select(self, group: str, chosen: list[str]) -> None:
        if group == EXPERIMENT and chosen[0].endswith((".yaml", ".yml")):
            message = (
                f"{EXPERIMENT}={chosen[0]}: expected the name of an experiment; a file is given by "
                f"its path alone: phasetrain {chosen[0]}"
            )
            self._add_problem(message, group, "config.unknown_file")
            return
        options = self._files.options(group) if self._files.is_group(group) else []
        unknown = [option for option in chosen if option not in options]
        for option in unknown:
            near = did_you_mean(option, options) or ";"
            listed = ", ".join(options) or "none"
            more = ""
            if group == EXPERIMENT:
                more = self._explain_experiments(option)
            elif group in LABELLED:
                more = f"; expected mapping, from labels to parameters, as in {group}.{option}={{}}"
            elif group in self._schema.sections:
                more = f"; a part is chosen by name with {group}.name={option}"
            message = (
                f"{group}={option}: there is no file {group}/{option}.yaml{near} options of "
                f"{group}: {listed}{more}"
            )
            self._add_problem(message, group, "config.unknown_file")
        if group == EXPERIMENT and len(chosen) > 1:
            several = ",".join(chosen)
            message = f"{EXPERIMENT}=[{several}]: a run has one experiment; add -m to run each"
            self._add_problem(message, group)
        elif unknown:
            return
        elif group == EXPERIMENT:
            self._name_experiment(f"{EXPERIMENT}={chosen[0]}", chosen[0])
        else:
            self._line.groups[group] = chosen

    def _explain_experiments(self, option: str) -> str:
        """Return where a custom experiment may be, for the message about one that is missing."""
        searched = "folder `experiment` of --config-dir DIR (default: ./configs or ./conf)"
        if self._files.config_dir is not None:
            searched = f"{self._files.config_dir}/{EXPERIMENT}"
        return f"; yours go into {searched}; or give a file: phasetrain path/to/{option}.yaml"

    def _set_value(self, path: str, override: Override) -> None:
        value = _text_keys(override.value())
        key = self._schema.key(path)
        if key is not None and isinstance(value, int | float) and not key.type.fits(value):
            # A key of type str takes the characters as typed: RUN.name=007.
            typed = override.get_value_string()
            value = typed if key.type.fits(typed) else value
        node = self._line.values
        *parents, last = path.split(".")
        for depth, name in enumerate(parents, 1):
            if isinstance(node.get(name), str) and part_pattern(".".join(parents[:depth])) in WORDS:
                node[name] = {"name": node[name]}
            if not isinstance(node.get(name), dict | None):
                parent = ".".join(parents[:depth])
                message = (
                    f"{override.input_line}: {parent} is set to {node[name]!r} by another override"
                )
                self._add_problem(message, path, "config.conflict")
                return
            node[name] = node.get(name) or {}
            node = node[name]
        node[last] = _merge_values(node.get(last), value)

    def _remove(self, path: str, value: Any) -> None:
        # The later override wins: `LOSS=focal ~LOSS` removes the selection before it.
        if path in self._line.groups:
            del self._line.groups[path]
        node: Any = self._line.values
        *parents, last = path.split(".")
        for name in parents:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
        self._line.removals.append((path, value))


def _take_split_value(text: str, words: list[str]) -> list[str]:
    """Remove and return the words that belong to the value of an override, which the shell has
    split at its spaces: up to the one that closes its brackets. None, if it is no such value."""
    if "=" not in text or not find_unclosed(text.partition("=")[2]):
        return []
    for count in range(1, len(words) + 1):
        if "=" in words[count - 1]:
            break  # the next override
        if not find_unclosed(" ".join([text.partition("=")[2], *words[:count]])):
            parts = words[:count]
            del words[:count]
            return parts
    return []


def _make_split_problem(parts: Sequence[str]) -> Problem:
    text = " ".join(parts)
    message = f"{text}: the shell has split this at its spaces; quote it as a whole: '{text}'"
    return Problem.from_message(message, "config.override", text.partition("=")[0])


def _list_files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.y*ml")]


def _reject(text: str, override: Override) -> str:
    """Return why an override that could be parsed cannot be used, or an empty string."""
    if not override.key_or_group:
        return _no_override(text)
    if override.is_sweep_override():
        return (
            f"{text} gives several values; add -m to train with each of them, write [a,b] for a "
            "list, or quote the value for a text with a comma"
        )
    if override.is_hydra_override():
        return f"{text}: settings of Hydra apply to sweeps only; add -m, or leave it out"
    if override.package is not None:
        return f"{text}: `@` can be used in the defaults list of a file only"
    return ""


def _unreadable(text: str, error: HydraException) -> Problem:
    key, equals, _ = text.partition("=")
    if not equals and not text.startswith("~"):
        return Problem.from_message(_no_override(text), "config.override")
    return Problem.from_message(explain_override_error(text, error), "config.override", key)


def _no_override(text: str) -> str:
    return (
        f"{text!r} is not an override; expected FILE.yaml, SECTION.key=value, SECTION=GROUP or "
        "~SECTION.key"
    )


def _is_options(value: Any) -> bool:
    # In `MODEL=[a,b]` each item names a file; a list of anything else is a value.
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, str) for v in value)
    return isinstance(value, str | int) and not isinstance(value, bool) and "${" not in str(value)


def _text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        # Hydra reads a label such as 1 as a number, and the keys of a config are texts.
        return {str(key): _text_keys(item) for key, item in value.items()}
    return value


def _merge_values(old: Any, new: Any) -> Any:
    """Return the new value; if both are mappings, keys that only the old one has are kept."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merge_values(old.get(key), value) for key, value in new.items()}
    return new


def make_override_parser() -> OverridesParser:
    """Return a parser of overrides with Hydra's functions and `seeds`."""
    parser = OverridesParser.create()
    parser.functions.register(SEEDS, list_seeds)
    return parser


def list_seeds(n: int, start: int = 0) -> ChoiceSweep:
    """Return `n` consecutive seeds: `seeds(5)` is `choice(0,1,2,3,4)`.

    Raises:
        ValueError: not 1 to MOST_SEEDS seeds, or a negative one; the parser reports it as an
            override that cannot be read.
    """
    if not 1 <= n <= MOST_SEEDS:
        raise ValueError(f"n = {n}: expected 1 to {MOST_SEEDS} seeds")
    if start < 0:
        raise ValueError(f"start = {start}: expected 0 or more")
    return ChoiceSweep(list=list(range(start, start + n)))


def is_seeds(override: Override) -> bool:
    """Return whether the values of an override are given by `seeds(n)`."""
    # The parsed value is a plain choice of numbers; only the text tells.
    return override.is_sweep_override() and override.get_value_string().startswith(f"{SEEDS}(")
