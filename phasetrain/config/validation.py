"""Everything that is wrong with a composed config, in one error: unknown keys, wrong types, unknown
parts."""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from inspect import Parameter
from pathlib import Path
from typing import Any

from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import leaves, lookup
from phasetrain.config.registry import Registry, free_parameters, parameter_types, parameters
from phasetrain.config.schema import (
    DEFAULTS,
    LABELLED,
    WORDS,
    Schema,
    is_split,
    part_pattern,
)
from phasetrain.config.sections import ENTRIES
from phasetrain.config.sections.keys import Key, section_keys
from phasetrain.config.suggestions import KnownPaths
from phasetrain.config.value_types import describe_type, fits
from phasetrain.errors import ConfigError, Problem, did_you_mean

PLUGINS = "phasetrain"  # entry point group of installed packages that register parts


@dataclass(frozen=True)
class Slot:
    """A place in the config where a name chooses a part.

    Attributes:
        path: dotted; `*` is one label or data split, `[]` at the end each item of a list.
        registry: where the name is looked up.
        key: the key that holds the name.
        label_is_name: the label is the name where none is given.
        provided: parameters that the program passes itself and a config must not set.
        own: section whose fields are the keys of the place that are not parameters of the part;
            None: that of `ENTRIES`, if any.
        only: a key, and the value with which there is such a place; None: there always is.
    """

    path: str
    registry: Registry[Any]
    key: str = "name"
    label_is_name: bool = False
    provided: frozenset[str] = frozenset()
    own: type | None = None
    only: tuple[str, str] | None = None

    @property
    def own_keys(self) -> Mapping[str, Key]:
        """Keys of the place by name, without the parameters of the part."""
        own = self.own or ENTRIES.get(self.path)
        if own is None:
            return {}
        return section_keys(own, self.path)


@dataclass(frozen=True)
class _Part:
    """A part that the config names, found in its registry."""

    path: str
    name: str
    slot: Slot
    given: Mapping[str, Any]
    takes: Mapping[str, Parameter]
    types: Mapping[str, Any]
    free: bool


@dataclass(frozen=True)
class _Unknown:
    """A key that nobody has, kept until all known paths are collected."""

    path: str
    value: Any
    what: str
    known: str


def check(composed: Composed, slots: Sequence[Slot], schema: Schema) -> None:
    """Refuse a config with mistakes.

    Raises:
        ConfigError: lists `composed.problems`, unknown sections and keys, values of a wrong type,
            unknown names of parts, and unknown or mistyped parameters of parts, each with its layer
            and the near miss.
    """
    raise_all([*composed.problems, *_Checker(composed, slots, schema).problems()])


def raise_all(problems: Sequence[str | Problem]) -> None:
    """Raise one ConfigError that lists the problems, each once; nothing when there is none."""
    if problems:
        raise several(problems)


def several(problems: Sequence[str | Problem]) -> ConfigError:
    """Return one error that lists the problems, each once; there is at least one."""
    found = [
        one if isinstance(one, Problem) else Problem.from_message(one, ConfigError.default_code)
        for one in problems
    ]
    unique = list({one.message: one for one in found}.values())
    if len(unique) == 1:
        return ConfigError(unique[0].message, code=unique[0].code, problems=unique)
    numbered = "\n".join(f"  {number}. {one.message}" for number, one in enumerate(unique, 1))
    return ConfigError(
        f"{len(unique)} problems in the config:\n{numbered}", code=unique[0].code, problems=unique
    )


def problems_in(error: ConfigError) -> list[str]:
    """Return the sentences of the mistakes that an error reports."""
    return [problem.message for problem in error.problems]


def found_by(*checks: Callable[[], object]) -> list[str]:
    """Return the mistakes that checks raise, each of which is made."""
    found: list[str] = []
    for one in checks:
        try:
            one()
        except ConfigError as error:
            found += problems_in(error)
    return found


class _Checker:
    """One pass over the parts that the config names, one over the keys of its sections."""

    def __init__(self, composed: Composed, slots: Sequence[Slot], schema: Schema) -> None:
        self._config = composed.config
        self._origins = composed.origins
        self._layers = composed.layers
        self._slots = slots
        self._schema = schema
        self._found: list[str] = []
        self._unknown: list[_Unknown] = []

    def problems(self) -> list[str]:
        parts = [
            part
            for slot in self._slots
            for path, value in self._places(slot)
            for part in self._part(slot, path, value)
        ]
        self._section(self._config, "")
        for part in parts:
            self._parameters(part)
        self._options_of_schedules(parts)
        known = KnownPaths(
            [
                *self._schema.keys,
                *(
                    f"{part.path}.{name}"
                    for part in parts
                    for name in (*part.takes, *part.slot.own_keys)
                ),
            ]
        )
        for unknown in self._unknown:
            near = known.near(unknown.path)
            meant = f"; did you mean {near}?" if near is not None else "."
            self._report(unknown.path, unknown.value, f"{unknown.what}{meant} {unknown.known}")
        return self._found

    # -- keys of sections

    def _section(self, values: Mapping[str, Any], path: str) -> None:
        for name, value in values.items():
            here = f"{path}.{name}" if path else name
            if self._schema.key(here) is not None:
                self._key(here, value)
            elif self._schema.children(here):
                self._keys(here, value)
            elif path not in LABELLED and part_pattern(path) is None and "." not in name:
                self._no_key(here, value, path)

    def _key(self, path: str, value: Any) -> None:
        problem = self._schema.problem(path, value)
        if (
            problem is not None and value != "???" and "${" not in str(value)
        ):  # those are among composed.problems
            self._report(path, value, problem)

    def _keys(self, path: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            self._report(
                path, value, f"expected keys below it: {', '.join(self._schema.children(path))}"
            )
            return
        if path.startswith("DATA.") and path not in ("DATA.TRAIN", "DATA.TEST"):
            self._split(path)
        self._section(value, path)

    def _split(self, path: str) -> None:
        if (
            self._origin(f"{path}.dataset") == DEFAULTS
        ):  # nobody named one, so this is rather a slip of the pen
            name = path.partition(".")[2]
            below = (
                o for p, o in self._origins.items() if p.startswith(f"{path}.") and o != DEFAULTS
            )
            layer = next(below, DEFAULTS)
            near = did_you_mean(name, [other for other in self._config["DATA"] if other != name])
            self._found.append(
                f"{path} ({layer}): each upper-case key of DATA but TRAIN is a test split, and this one has no "
                f"data set; set {path}.dataset{near}"
            )

    def _no_key(self, path: str, value: Any, parent: str) -> None:
        below = leaves(value, path) if isinstance(value, Mapping) else {}
        if len(below) == 1:
            path, value = next(iter(below.items()))
        known = (
            f"Known {'keys' if parent else 'sections'}: {', '.join(self._schema.children(parent))}"
        )
        self._unknown.append(_Unknown(path, value, "no such key", known))

    # -- parts

    def _places(self, slot: Slot) -> Iterator[tuple[str, Any]]:
        if slot.only is not None and lookup(self._config, slot.only[0]) != slot.only[1]:
            return
        names = slot.path.removesuffix("[]").split(".")
        for path, value in _expanded(self._config, "", names):
            if not slot.path.endswith("[]"):
                yield path, value
            elif isinstance(value, list):
                yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))

    def _part(self, slot: Slot, path: str, value: Any) -> Iterator[_Part]:
        word = slot.path in WORDS or slot.path.endswith("[]")
        if not isinstance(value, Mapping) and not (word and isinstance(value, str)):
            if self._schema.key(path) is None and not self._schema.children(
                path
            ):  # else said with the keys
                self._report(path, value, _no_part(slot, path, value, word=word))
            return
        given = value if isinstance(value, Mapping) else {slot.key: value}
        name = given.get(slot.key, path.rpartition(".")[2] if slot.label_is_name else None)
        where = f"{path}.{slot.key}" if isinstance(value, Mapping) and slot.key in given else path
        if not isinstance(name, str):
            if self._schema.key(f"{path}.{slot.key}") is None:  # else said with the keys
                self._report(
                    where, given.get(slot.key, value), _no_part(slot, path, value, word=word)
                )
            return
        try:
            factory = slot.registry.find(name, where)
        except ConfigError as error:
            self._report(where, name, str(error).removeprefix(f"{where} = {name!r}: "))
            return
        takes = {n: p for n, p in parameters(factory).items() if n not in slot.provided}
        yield _Part(
            path, name, slot, given, takes, parameter_types(factory), free_parameters(factory)
        )

    def _parameters(self, part: _Part) -> None:
        own = part.slot.own_keys
        for key, value in part.given.items():
            here = f"{part.path}.{key}"
            if key == part.slot.key or self._schema.key(here) is not None or "." in key:
                continue
            if self._schema.children(here):  # a group of the section's own keys
                continue
            if key in own:
                if not own[key].type.fits(value):
                    self._report(here, value, f"expected {own[key].type.text}")
            elif key in part.slot.provided:
                self._report(here, value, "the program passes this one itself; leave it out")
            elif part.free and key == "params":
                if not isinstance(value, Mapping):
                    self._report(here, value, "expected a mapping")
            elif key not in part.takes:
                takes = ", ".join([*part.takes, *own]) or "no parameters"
                more = f"{takes}, and others in one mapping `params`" if part.free else takes
                self._unknown.append(
                    _Unknown(
                        here, value, f"{part.name!r} has no such parameter", f"It takes: {more}"
                    )
                )
            elif not _accepts(part.takes[key], part.types, value):
                self._report(here, value, f"expected {describe_type(part.types[key])}")

    def _options_of_schedules(self, parts: Sequence[_Part]) -> None:
        optimizer = next((part for part in parts if part.path == "OPTIMIZER"), None)
        schedules = lookup(self._config, "OPTIMIZER.SCHEDULES")
        if optimizer is None or optimizer.free or not isinstance(schedules, Mapping):
            return
        options = list(
            dict.fromkeys(["lr", *optimizer.takes])
        )  # every optimizer has a learning rate
        for option in [option for option in schedules if option not in options]:
            path = f"OPTIMIZER.SCHEDULES.{option}"
            self._found.append(
                f"{path} ({self._origin(path)}): {optimizer.name!r} has no option {option!r}"
                f"{did_you_mean(option, options) or '.'} It has: {', '.join(options)}"
            )

    # -- sentences

    def _report(self, path: str, value: Any, problem: str) -> None:
        self._found.append(f"{path} = {shown(value)} ({self._origin(path)}): {problem}")

    def _origin(self, path: str) -> str:
        path = path.partition("[")[0]
        if path in self._origins:
            return self._origins[path]
        below = [layer for known, layer in self._origins.items() if known.startswith(f"{path}.")]
        return max(below, key=self._layers.index, default="")


def shown(value: Any) -> str:
    """Return a value as it is written in YAML, at most 60 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."


def run_imports(names: Sequence[str]) -> list[str]:
    """Import the modules of `RUN.imports`, so that their parts are registered; the current folder
    is searched too.

    Returns:
        one sentence per module that failed: its error, and the file and line where it broke.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(
            here
        )  # last, so that no file of the folder hides a module of a library; stays for workers
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module can raise anything; each is listed
            problems.append(f"RUN.imports: {_import_problem(name, error)}")
    return problems


def load_plugins() -> list[str]:
    """Load the entry points of group `phasetrain`, so that installed packages register their parts.

    Returns:
        one warning per entry point that failed; a stale package must not block every run.
    """
    warnings = []
    for point in entry_points(group=PLUGINS):
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - an installed package can raise anything
            package = point.dist.name if point.dist is not None else "unknown package"
            warnings.append(
                f"plugin {point.name!r} of {package} is left out: {_import_problem(point.module, error)}"
            )
    return warnings


def _import_problem(name: str, error: Exception | SystemExit) -> str:
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name is not None
        and f"{name}.".startswith(f"{error.name}.")
    ):
        files: list[str] = []
        with suppress(OSError):  # the current folder may be closed to this user
            files = [path.stem for path in Path.cwd().glob("*.py")]
        return f"there is no module {name!r}, neither installed nor in {Path.cwd()}{did_you_mean(name, files)}"
    if isinstance(error, SyntaxError):
        return f"module {name!r} failed: {error.msg} ({error.filename}:{error.lineno})"
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith("<frozen importlib")
    ]
    own = [f for f in frames[1:] if f.filename not in (importlib.__file__, __file__)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"module {name!r} failed: {type(error).__name__}: {error}{place}"


def _expanded(node: Any, path: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if not names:
        yield path, node
    elif isinstance(node, Mapping):
        if names[0] == "*":
            wanted = [name for name in node if path != "DATA" or is_split(name)]
        else:
            wanted = [names[0]]
        for name in wanted:
            if name in node:
                yield from _expanded(node[name], f"{path}.{name}" if path else name, names[1:])


def _no_part(slot: Slot, path: str, value: Any, *, word: bool) -> str:
    known = ", ".join(slot.registry)
    if isinstance(value, str):
        return f"expected a mapping of parameters; a {slot.registry.kind} is named by {path}.{slot.key}={value}"
    if isinstance(value, Mapping):
        return f"names no {slot.registry.kind}; set {path}.{slot.key}. Known: {known}"
    expected = f"a name or a mapping with `{slot.key}`" if word else "a mapping of parameters"
    return f"expected {expected}. Known: {known}"


def _accepts(parameter: Parameter, types: Mapping[str, Any], value: Any) -> bool:
    if parameter.name not in types or (value is None and parameter.default is None):
        return True
    return (isinstance(value, str) and "${" in value) or fits(value, types[parameter.name])
