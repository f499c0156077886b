"""Texts of `phasetrain help TOPIC`: sections, keys and parts."""

import inspect
from collections.abc import Iterator

from phasetrain.addons.authoring.interfaces import explain_interface
from phasetrain.addons.authoring.recipes import list_recipes
from phasetrain.app.slots import list_slots
from phasetrain.config.compose.folders import EXPERIMENT, list_options
from phasetrain.config.parts import FACTS
from phasetrain.config.problems import format_value
from phasetrain.config.registry import parameters
from phasetrain.config.schema import DEFAULT_NAMES, default_schema, matches
from phasetrain.config.sections.keys import Key
from phasetrain.config.suggestions import ELSEWHERE
from phasetrain.config.validation import PartLocation
from phasetrain.errors import ConfigError, did_you_mean, plain

IN_DOCS = "in the docs"
"""First line of the help on words that only recipes of the docs have."""


def topic_help(topic: str) -> str:
    """Return the help on a section, a key, a group of keys, or a part; all that have the name. If
    there is none, return the recipes of the docs with these words.

    Args:
        topic: `OPTIMIZER`, `CHECKPOINT.best`, `OPTIMIZER.lr`, `lr`, `OPTIMIZER.momentum`, `cosine`,
            `METERS.accuracy`, a class name of torch such as `RAdam`, a kind of parts such as
            `losses`, or `parts`. Sections and kinds in any case.

    Raises:
        ConfigError: there is nothing of this name.
    """
    topic = topic.replace(" ", "_")  # `help label smoothing`
    schema = default_schema()
    if topic in schema.sections:
        return _section_help(topic)
    if topic.lower() == "parts":
        return _list_all_parts()
    paragraphs = ["\n".join(lines) for lines in _list_parts_named(topic)]
    section = _find_section(topic)
    if section:
        paragraphs.append(_section_help(section))
    else:
        paragraphs = [
            *("\n".join(lines) for lines in (*_list_keys(topic), *_list_parts_with(topic))),
            *paragraphs,
        ]
    paragraphs = paragraphs or ["\n".join(lines) for lines in _list_related(topic)]
    if paragraphs:
        return "\n\n".join(paragraphs)
    if key_here := ELSEWHERE.get(plain(topic)):
        return f"{topic}: here {key_here}\n\n{topic_help(key_here)}"
    if recipes := list_recipes(topic):
        return "\n".join([IN_DOCS, *recipes])
    parts = [name for slot in list_slots() for name in slot.registry]
    experiments = list_options(None)[EXPERIMENT]
    near = did_you_mean(topic, [*schema.sections, *schema.keys, *parts, *experiments]) or "."
    raise ConfigError(
        f"help {topic}: no section, key, part, experiment or command has this name{near} Sections: "
        f"{', '.join(schema.sections)}",
        code="config.unknown_section",
    )


def _find_section(topic: str) -> str:
    """Return the section whose name, or whose kind of parts, a topic is in any case: `optimizer`
    and `optimizers`, `models`; empty if there is none."""
    sections = default_schema().sections
    if topic.upper() in sections:
        return topic.upper()
    for slot in sorted(list_slots(), key=_is_conditional):
        if topic.lower() in (slot.kind, _plural(slot.kind)):
            return slot.path.partition(".")[0]
    return ""


def _plural(kind: str) -> str:
    if kind.endswith("s"):
        return f"{kind}es"
    return f"{kind}s"


def _list_all_parts() -> str:
    """Return the names of the parts of each kind, with the keys that choose them."""
    places: dict[int, list[PartLocation]] = {}
    for slot in sorted(list_slots(), key=_is_conditional):
        places.setdefault(id(slot.registry), []).append(slot)
    paragraphs = []
    for slots in places.values():
        registry = slots[0].registry
        keys = dict.fromkeys(f"{slot.path}.{slot.key}" for slot in slots)
        paragraphs.append(
            f"{_plural(registry.kind)}, for {next(iter(keys))}\n  {', '.join(registry)}"
        )
    return "\n\n".join(paragraphs)


def _section_help(section: str) -> str:
    lines = [f"keys of {section}"]
    for path, key in default_schema().keys.items():
        if path == section or path.startswith(f"{section}."):
            lines += _describe_key(path, key)
    slots = [slot for slot in list_slots() if slot.path.partition(".")[0] == section]
    # Several places take the same parts, such as OPTIMIZER and OPTIMIZER.others.*.
    for registry in {id(slot.registry): slot.registry for slot in slots}.values():
        places = [slot for slot in slots if slot.registry is registry]
        paths = dict.fromkeys(slot.path for slot in places)
        lines += ["", f"{_plural(registry.kind)} ({', '.join(paths)})"]
        own = {key.path: key for slot in places for key in slot.own_keys.values()}
        for path, key in own.items():
            lines += _describe_key(path, key)
        for name in registry:
            lines += _describe_part(places[0], name)
    return "\n".join(lines)


def _list_keys(topic: str) -> Iterator[list[str]]:
    """Yield the lines of each key with a path, below a path, or with a last name."""
    schema = default_schema()
    key = schema.key(topic)
    if key is not None:
        yield _describe_key(topic, key)
        return
    below = [path for path in schema.keys if path.startswith(f"{topic}.")]
    for path in below or [path for path in schema.keys if path.endswith(f".{topic}")]:
        yield _describe_key(path, schema.keys[path])
    if not below:
        for slot in list_slots():
            for name, own in slot.own_keys.items():
                if topic == name or matches(topic, own.path):
                    yield _describe_key(own.path, own)


def _list_parts_with(topic: str) -> Iterator[list[str]]:
    """Yield a heading and the lines of each part that takes the parameter with a path."""
    path, _, parameter = topic.rpartition(".")
    heading = [f"{topic} is a parameter of"]
    for slot in list_slots():
        if not path or not matches(path, slot.path.removesuffix("[]")):
            continue
        for name, factory in slot.registry.items():
            if parameter in parameters(factory) and parameter not in slot.provided:
                yield [*heading, *_describe_part(slot, name)]
                heading = []


def _list_related(topic: str) -> Iterator[list[str]]:
    """Yield the lines about names of the Python interfaces, and about parts of any section with a
    parameter."""
    yield from explain_interface(topic)
    for slot in list_slots():
        if topic not in slot.provided and not _is_conditional(slot):
            takers = [name for name, part in slot.registry.items() if topic in parameters(part)]
            if takers:
                yield [f"{slot.path}.{topic} of", f"  {', '.join(takers)}"]


def _list_parts_named(topic: str) -> Iterator[list[str]]:
    """Yield the lines of the parts with a name, or with the label that is the last name of a path,
    with the words that choose them."""
    path, _, name = topic.rpartition(".")
    # Where a registry has several places, the first one that every run has is shown.
    slots: dict[int, PartLocation] = {}
    for slot in sorted(list_slots(), key=_is_conditional):
        # A label is the default name of a part: HOOKS.csv.
        if not path or (slot.path in DEFAULT_NAMES and matches(topic, slot.path)):
            slots.setdefault(id(slot.registry), slot)
    for slot in slots.values():
        registry = slot.registry
        try:
            registry.find(name)
        except ConfigError:
            continue
        lines = _describe_part(slot, name, in_full=True)
        yield [f"{registry.kind} for {slot.path}.{slot.key}", *lines]


def _is_conditional(slot: PartLocation) -> bool:
    return slot.only is not None


def _describe_key(path: str, key: Key) -> list[str]:
    details = f"{key.type.text}; {key.resume} on resume"
    return [f"  {path} = {format_value(key.default)}   ({details})", f"      {key.meaning}"]


def _describe_part(slot: PartLocation, name: str, *, in_full: bool = False) -> list[str]:
    """Return signature and summary of a part; in full, the whole docstring of one that is not a
    library's, and the values that the program fills in."""
    factory = slot.registry.find(name)
    takes = {
        key: parameter for key, parameter in parameters(factory).items() if key not in slot.provided
    }
    # The parts of DATA are what these facts are found from.
    facts: list[str] = []
    if not slot.path.startswith("DATA.") or slot.path == "DATA.TRAIN.batch_transforms[]":
        facts = [key for key in takes if key in FACTS]
    shown = [_format_parameter(p) for key, p in takes.items() if key not in facts]
    lines = [f"  {name}({', '.join(shown)})"]
    text = inspect.cleandoc(factory.__doc__ or "")
    if in_full and name in slot.registry:
        lines += [f"      {line}".rstrip() for line in text.splitlines()]
    elif text:
        summary = text.partition("\n\n")[0]
        lines.append(f"      {' '.join(summary.split())}")
    if facts and in_full:
        lines.append(f"      filled in by phasetrain: {', '.join(facts)}")
    return lines


def _format_parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={format_value(parameter.default)}"
