"""Validation of a composed config: unknown keys, wrong types, unknown parts and parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasetrain.config.addons import PartPlace, explain_missing, list_parts
from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.folders import EXPERIMENT
from phasetrain.config.compose.merge import lookup
from phasetrain.config.engines import list_engines
from phasetrain.config.nested import leaves
from phasetrain.config.parts import RUN_FACTS
from phasetrain.config.problems import make_problem, raise_all
from phasetrain.config.registry import (
    Registry,
    Signature,
    find_registry,
    find_signature,
    list_names,
)
from phasetrain.config.schema import (
    DEFAULT_NAMES,
    DEFAULTS,
    LABELLED,
    PARTS,
    WORDS,
    Schema,
    is_split,
    matches,
    part_pattern,
)
from phasetrain.config.sections.extended import complete_entries
from phasetrain.config.sections.keys import Key, join_path, section_keys
from phasetrain.config.sections.value_types import describe_type, fits, list_choices
from phasetrain.config.stages import LENGTHS
from phasetrain.config.suggestions import KnownPaths, find_synonym
from phasetrain.errors import ConfigError, Problem, did_you_mean, nearest


@dataclass(frozen=True)
class PartLocation(PartPlace):
    """A place in the config where a name chooses a part, with its registry and its own keys."""

    @property
    def registry(self) -> Registry[Any]:
        """The registry of the kind, whose module is imported when it is first asked for."""
        return find_registry(self.kind)

    @property
    def key(self) -> str:
        """The key with the name of the part."""
        return PARTS.get(self.path, "name")

    @property
    def own_keys(self) -> Mapping[str, Key]:
        """Keys of the place by name, without the parameters of the part."""
        entries = complete_entries()
        if self.path not in entries:
            return {}
        return section_keys(entries[self.path], self.path)

    @property
    def default_name(self) -> str | None:
        """The name of the part if the config gives none; None if it must give one."""
        own = self.own_keys.get(self.key)
        if own is None or not isinstance(own.default, str):
            return None
        return own.default

    @property
    def takes_bare_name(self) -> bool:
        """Whether a plain name is short for a mapping with the name."""
        return self.path in WORDS or self.path.endswith("[]")


@dataclass(frozen=True)
class _NamedPart:
    """A place that names a part, which is not looked up yet."""

    path: str
    name: str
    section: Mapping[str, Any]
    named_by: str
    """Key with the name, for messages."""


@dataclass(frozen=True)
class _Part:
    """A part that the config names, found in its registry."""

    path: str
    name: str
    slot: PartLocation
    section: Mapping[str, Any]
    signature: Signature
    is_guess: bool = False
    """Whether the name is the suggestion for a misspelt one."""

    @property
    def takes(self) -> list[str]:
        """The names of the parameters that a config may set."""
        return [name for name in self.signature.names if name not in self.slot.provided]

    def accepts(self, key: str, value: Any) -> bool:
        """Return whether a value can be passed as a parameter; interpolations are not checked."""
        types = self.signature.types
        # Libraries often annotate an optional parameter without None, as in `size: int = None`.
        if key not in types or (value is None and key in self.signature.optional):
            return True
        return (isinstance(value, str) and "${" in value) or fits(value, types[key])


@dataclass(frozen=True)
class _Unknown:
    """An unknown key; its suggestion needs all known paths."""

    code: str
    path: str
    value: Any
    sentence: str
    advice: str


def check_config(composed: Composed, slots: Sequence[PartLocation], schema: Schema) -> None:
    """Reject a config with mistakes.

    Raises:
        ConfigError: lists `composed.problems`, unknown sections and keys, values of a wrong type,
            unknown names of parts, and unknown or mistyped parameters of parts, each with its layer
            and a suggestion.
    """
    report = _Report(composed)
    # Parts are found first, since unknown keys anywhere may be suggested to be their parameters.
    finder = _PartFinder(composed.config, schema, report)
    parts = [part for slot in slots for part in finder.find_parts(slot)]
    _KeyChecker(composed.config, schema, report).check_section(composed.config, "")
    for part in parts:
        _check_parameters(part, schema, report)
    _check_schedule_options(composed.config, parts, report)
    # Last, since the suggestions need the parameters of all parts.
    report.add_unknown_keys(_known_paths(schema, parts))
    raise_all([*composed.problems, *report.problems])
    # A part that cannot be imported is reported now, and not when the data has been read.
    for part in parts:
        if part.name in list_parts(part.slot.kind):
            part.slot.registry[part.name]


def find_part_names(
    composed: Composed, slots: Sequence[PartLocation], schema: Schema
) -> dict[str, list[str]]:
    """Return path of a slot -> names of the parts that a config names there.

    Raises:
        ConfigError: lists the names that do not exist or cannot be loaded.
    """
    report = _Report(composed)
    finder = _PartFinder(composed.config, schema, report)
    names = {
        slot.path: [
            named.name
            for named in finder.name_parts(slot)
            # Declared parts exist: their modules need not be imported.
            if named.name in list_parts(slot.kind) or finder.look_up(slot, named)
        ]
        for slot in slots
    }
    raise_all(report.problems)
    return names


class _Report:
    """The problems found so far, each with the layer that set the value."""

    def __init__(self, composed: Composed) -> None:
        self.problems: list[Problem] = []
        self.unknown: list[_Unknown] = []
        self.origins = composed.origins
        self._layers = composed.layers

    def add(
        self, code: str, path: str, value: Any, sentence: str, suggestion: str | None = None
    ) -> None:
        layer = self.layer_of(path)
        self.problems.append(make_problem(code, path, value, layer, sentence, suggestion or ""))

    def add_sentence(self, code: str, path: str, sentence: str) -> None:
        """Add a problem of a path whose value is not shown."""
        message = f"{path} ({self.layer_of(path)}): {sentence}"
        self.problems.append(Problem.from_message(message, code, path))

    def add_unknown_keys(self, known: KnownPaths) -> None:
        """Add the unknown keys with their suggestions."""
        for key in self.unknown:
            near = known.near(key.path)
            meant = f"; did you mean {near}?" if near is not None else "."
            if key.path.rpartition(".")[2].isdigit() and key.value is None:
                # YAML reads {lr: 0,1} as two keys.
                near = None
                meant = "; a decimal number has a point, as in 0.1."
            self.add(key.code, key.path, key.value, f"{key.sentence}{meant} {key.advice}", near)

    def layer_of(self, path: str) -> str:
        """Return the layer that set a path, or the highest one that set a key below it."""
        # A list is one leaf, so its items have the layer of the list.
        path = path.partition("[")[0]
        if path in self.origins:
            return self.origins[path]
        below = [layer for key, layer in self.origins.items() if key.startswith(f"{path}.")]
        return max(below, key=self._layers.index, default="")


@dataclass(frozen=True)
class _Checker:
    """Checks a config, and adds its problems to a report."""

    config: Mapping[str, Any]
    schema: Schema
    report: _Report


class _KeyChecker(_Checker):
    """Checks the keys of the sections, without parameters of parts."""

    def check_section(self, values: Mapping[str, Any], path: str) -> None:
        """Check the keys below a path, which is empty for the whole config."""
        for name, value in values.items():
            here = join_path(path, name)
            key = self.schema.key(here)
            if key is not None:
                self._check_key(key, here, value)
            elif self.schema.children(here):
                self._check_group(here, value)
            # Below a part, a key that is not of the section may be a parameter of the part: only
            # the part's signature can tell, in `_check_parameters`.
            elif path not in LABELLED and part_pattern(path) is None and "." not in name:
                self._add_unknown(here, value, path)

    def _check_key(self, key: Key, path: str, value: Any) -> None:
        if value == "???" or "${" in str(value):
            return  # already among the problems of the composition
        if not key.type.fits(value):
            sentence = f"expected {key.type.text}{self._show_form(path, value)}"
            self.report.add("config.wrong_type", path, value, sentence)
        elif key.fields is not None and isinstance(value, Mapping):
            self._check_mapping(section_keys(key.fields, path), path, value)

    def _show_form(self, path: str, value: Any) -> str:
        """Return how a value of a wrong type is probably meant, or an empty text."""
        first = value
        if isinstance(value, list) and value:
            first = value[0]
        if path in LABELLED and isinstance(first, str):
            entry = f"{first}: {{}}"
            if path == "OPTIMIZER.SCHEDULES":
                entry = f"lr: {first}"
            return f" from labels to parameters, as in {path}: {{{entry}}}"
        key = self.schema.key(path)
        if key is None:
            return ""
        is_in_file = self.report.layer_of(path).endswith((".yaml", ".yml"))
        if isinstance(value, bool) and is_in_file and key.type.fits("text"):
            return "; YAML reads yes, no, on and off as true and false, unless in quotes"
        if isinstance(value, str):
            return _show_form_of_text(key, value)
        if path.endswith(".dataset") and isinstance(value, Mapping) and "name" in value:
            overrides = [f"{path}={value['name']}"]
            split = path.removesuffix("dataset")
            overrides += [f"{split}{name}=..." for name in value if name != "name"]
            return f"; the parameters of a dataset are next to its name: {' '.join(overrides)}"
        if value is True and key.type.fits({}):
            return "; write {} for its defaults"
        if key.fields is not None:
            return f" with keys {', '.join(section_keys(key.fields, path))}"
        return ""

    def _check_mapping(self, keys: Mapping[str, Key], path: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in keys:
                self._check_key(keys[name], f"{path}.{name}", value)
            else:
                listed = f"Known keys: {', '.join(keys)}"
                unknown = _Unknown(
                    "config.unknown_key", f"{path}.{name}", value, "no such key", listed
                )
                self.report.unknown.append(unknown)

    def _check_group(self, path: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            children = ", ".join(self.schema.children(path))
            form = self._show_form(path, value) or f" of keys: {children}"
            pattern = part_pattern(path)
            if isinstance(value, str) and pattern is not None:
                form = f", as in {path}: {{{PARTS[pattern]}: {value}}}"
            elif value is None:
                first = children.partition(",")[0]
                form += (
                    f"; leave {path} out for its defaults, or set a key, as in {path}.{first}=..."
                )
            self.report.add("config.wrong_type", path, value, f"expected mapping{form}")
            return
        if matches(path, "DATA.*") and value.get("dataset") is None:
            self._check_missing_dataset(path)
        self.check_section(value, path)

    def _check_missing_dataset(self, path: str) -> None:
        name = path.partition(".")[2]
        if name != "TRAIN":
            # A split without a dataset is rather a misspelt key of DATA.
            near = did_you_mean(name, [other for other in self.config["DATA"] if other != name])
            sentence = (
                "each upper-case key of DATA except TRAIN is a test split, and this one has no "
                f"dataset; set {path}.dataset{near}"
            )
        elif not self._needs_training_data():
            return
        else:
            sentence = (
                "no dataset is set; set DATA.TRAIN.dataset, or start from an experiment, as in "
                "experiment=digits; for tests only, set DATA.TEST.dataset and PHASES.epochs=0"
            )
            if self.report.layer_of(f"{path}.dataset") != DEFAULTS:
                # The default experiment has one, see `Merged.drop_assumed_datasets`.
                sentence = (
                    "no dataset is set, and that of the default experiment does not go with the "
                    "dataset of the other splits; set DATA.TRAIN.dataset"
                )
        self.report.add_sentence("config.missing_dataset", path, sentence)

    def _needs_training_data(self) -> bool:
        engine = list_engines().get(str(lookup(self.config, "RUN.engine")))
        tests = filter(is_split, self.config["DATA"].keys() - {"TRAIN"})
        if any(tests) and any(lookup(self.config, f"PHASES.{unit}") == 0 for unit in LENGTHS):
            return False  # `build_stages` checks that no length of a higher layer is above 0
        return engine is None or engine.needs_training_data

    def _add_unknown(self, path: str, value: Any, parent: str) -> None:
        below = leaves(value, path) if isinstance(value, Mapping) else {}
        # The override `MODLE.name=x` is a mapping with one leaf; the suggestion is for the leaf.
        if len(below) == 1:
            path, value = next(iter(below.items()))
        word = "keys" if parent else "sections"
        advice = f"Known {word}: {', '.join(self.schema.children(parent))}{explain_missing()}"
        is_section = not parent and path.partition(".")[0].isupper()
        code = "config.unknown_section" if is_section else "config.unknown_key"
        self.report.unknown.append(_Unknown(code, path, value, "no such key", advice))


class _PartFinder(_Checker):
    """Looks up the parts that the config names."""

    def find_parts(self, slot: PartLocation) -> list[_Part]:
        """Return the parts that are named in a slot; a name that does not exist is reported."""
        parts = [self.look_up(slot, named) for named in self.name_parts(slot)]
        return [part for part in parts if part is not None]

    def name_parts(self, slot: PartLocation) -> list[_NamedPart]:
        """Return the named parts of a slot; a place without a name is reported."""
        parts = [self._name_part(slot, path, value) for path, value in self._list_places(slot)]
        return [part for part in parts if part is not None]

    def _list_places(self, slot: PartLocation) -> Iterator[tuple[str, Any]]:
        if slot.only is None:
            yield from _expand(self.config, "", slot.path.split("."))
            return
        outer, name = slot.only
        inner = slot.path.removeprefix(f"{outer}.").split(".")
        for path, value in _expand(self.config, "", outer.split(".")):
            if isinstance(value, Mapping) and value.get(PARTS.get(outer, "name")) == name:
                yield from _expand(value, path, inner)

    def _name_part(self, slot: PartLocation, path: str, value: Any) -> _NamedPart | None:
        if isinstance(value, Mapping):
            section = value
        elif slot.takes_bare_name and isinstance(value, str):
            section = {slot.key: value}
        else:
            # A checked place is reported by `_KeyChecker`, and one mistake must not appear twice.
            if not self.schema.has(path):
                sentence = _describe_expected(slot, path, value)
                self.report.add("config.missing_part", path, value, sentence)
            return None
        default = slot.default_name
        if slot.path in DEFAULT_NAMES:
            default = path.rpartition(".")[2]
        name = section.get(slot.key, default)
        named_by = path
        if section is value and slot.key in section:
            named_by = f"{path}.{slot.key}"
        if not isinstance(name, str):
            if not self.schema.has(f"{path}.{slot.key}"):
                sentence = _describe_expected(slot, path, value)
                wrong = section.get(slot.key, value)
                self.report.add("config.missing_part", named_by, wrong, sentence)
            return None
        return _NamedPart(path, name, section, named_by)

    def look_up(self, slot: PartLocation, named: _NamedPart) -> _Part | None:
        """Return a part; None if there is none of this name, which is reported."""
        name, named_by = named.name, named.named_by
        try:
            signature = find_signature(slot.kind, name, named_by)
        except ConfigError as error:
            sentence = str(error).removeprefix(f"{named_by} = {name!r}: ")
            problem = error.problems[0]
            self.report.add(problem.code, named_by, name, sentence, problem.suggestion)
            # So that its misspelt parameters are in the same report. The suggestion for a part of
            # another library is without the name of the library, and would not be found.
            if "." in name or not problem.suggestion:
                return None
            name = problem.suggestion
            signature = find_signature(slot.kind, name, named_by)
        is_guess = name != named.name
        return _Part(named.path, name, slot, named.section, signature, is_guess)


def _check_parameters(part: _Part, schema: Schema, report: _Report) -> None:
    own = part.slot.own_keys
    for key, value in part.section.items():
        here = f"{part.path}.{key}"
        # Keys with a dot are problems of the composition.
        if key in (part.slot.key, *part.slot.other_keys) or schema.has(here) or "." in key:
            continue  # checked with the keys of the section, or by who reads them
        # The schedule `step` and those of torch have a parameter `every` with other values.
        if key in own and not (key == "every" and key in part.takes):
            if not own[key].type.fits(value):
                report.add("config.wrong_type", here, value, f"expected {own[key].type.text}")
        elif key in part.slot.provided:
            sentence = "the program sets this parameter itself; leave it out"
            report.add("config.reserved_parameter", here, value, sentence)
        elif part.signature.takes_any and key == "params":
            if not isinstance(value, Mapping):
                report.add("config.wrong_type", here, value, "expected mapping")
        elif part.is_guess and (key in part.takes or not nearest(key, part.takes, likeness=0.8)):
            continue
        elif key not in part.takes:
            listed = [name for name in part.takes if name not in RUN_FACTS]
            accepted = ", ".join([*listed, *own, *part.slot.other_keys]) or "no parameters"
            if part.signature.takes_any:
                accepted = f"{accepted}, and others in one mapping `params`"
            sentence = f"{part.name!r} has no such parameter"
            if key in list_names(part.slot.kind) and (value is None or isinstance(value, Mapping)):
                noun = part.slot.kind
                sentence += f" (a {noun} is named by {part.path}.{part.slot.key}={key})"
            report.unknown.append(
                _Unknown("config.unknown_parameter", here, value, sentence, f"It takes: {accepted}")
            )
        elif not part.accepts(key, value):
            sentence = f"expected {describe_type(part.signature.types[key])}"
            report.add("config.wrong_type", here, value, sentence)


def _check_schedule_options(
    config: Mapping[str, Any], parts: Sequence[_Part], report: _Report
) -> None:
    optimizer = next((part for part in parts if part.path == "OPTIMIZER"), None)
    schedules = lookup(config, "OPTIMIZER.SCHEDULES")
    if optimizer is None or optimizer.signature.takes_any or not isinstance(schedules, Mapping):
        return
    # The learning rate is passed by the program, so it is not among the parameters.
    options = list(dict.fromkeys(["lr", *optimizer.takes]))
    for option in schedules:
        if option not in options:
            near = did_you_mean(find_synonym(option, options) or option, options) or "."
            report.add_sentence(
                "config.unknown_option",
                f"OPTIMIZER.SCHEDULES.{option}",
                f"{optimizer.name!r} has no option {option!r}{near} It has: {', '.join(options)}",
            )


def _known_paths(schema: Schema, parts: Sequence[_Part]) -> KnownPaths:
    of_mappings = [
        f"{path}.{name}"
        for path, key in schema.keys.items()
        if key.fields is not None
        for name in section_keys(key.fields, path)
    ]
    of_parts = [
        f"{part.path}.{name}"
        for part in parts
        for name in (*part.takes, *part.slot.own_keys, *part.slot.other_keys)
    ]
    return KnownPaths([*schema.keys, *of_parts, *of_mappings, EXPERIMENT])


def _expand(node: Any, path: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each place that a pattern with `*` and `[]` matches."""
    if not names:
        yield path, node
        return
    if not isinstance(node, Mapping):
        return
    first = names[0].removesuffix("[]")
    wanted = [first]
    if first == "*":
        wanted = [name for name in node if path != "DATA" or is_split(name)]
    for name in filter(node.__contains__, wanted):
        here = join_path(path, name)
        if not names[0].endswith("[]"):
            yield from _expand(node[name], here, names[1:])
        elif isinstance(node[name], list):
            for index, item in enumerate(node[name]):
                yield from _expand(item, f"{here}[{index}]", names[1:])


def _show_form_of_text(key: Key, text: str) -> str:
    """Return how a text is probably meant for a key that does not take it, or an empty text."""
    if key.type.fits([text]):
        return f"; write [{text}]"
    if text.lower() in ("none", "nil") and key.type.fits(None):
        return "; did you mean null?"
    try:
        number: float = float(text)
    except ValueError:
        choices = list_choices(key.type.annotation)
        near = find_synonym(text, choices) or nearest(text, choices, likeness=0.7)
        hint = explain_missing() if key.path == "RUN.engine" else ""
        return did_you_mean(near or "", choices) + hint
    if key.type.fits(number) or (number.is_integer() and key.type.fits(int(number))):
        return "; write it without quotes"
    return ""


def _describe_expected(slot: PartLocation, path: str, value: Any) -> str:
    known = list_names(slot.kind)
    names = ", ".join(known)
    noun = slot.kind
    if isinstance(value, str):
        return f"expected a mapping of parameters; a {noun} is named by {path}.{slot.key}={value}"
    if isinstance(value, Mapping):
        first = next(iter(value), "")
        if len(value) == 1 and first in known:
            # As in other frameworks: {random_shift: {pixels: 1}}.
            form = f"{slot.key}: {first}"
            if isinstance(value[first], Mapping):
                form = ", ".join([form, *(f"{key}: ..." for key in value[first])])
            return f"names no {noun}; write {{{form}}}"
        return f"names no {noun}; set {path}.{slot.key}. Known: {names}"
    if value is True and slot.path in DEFAULT_NAMES:
        return f"expected a mapping of parameters; write {path}={{}} for its defaults"
    if slot.takes_bare_name:
        return f"expected a name or a mapping with `{slot.key}`. Known: {names}"
    return f"expected a mapping of parameters. Known: {names}"
