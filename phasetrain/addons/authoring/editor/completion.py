"""The command `phasetrain completion`: a script for a shell that completes words.

The words are in the script, so that completing needs no Python, which would import torch for the
names of parts. Experiments, options and run folders of the user are found by the shell.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from phasetrain.addons.authoring.code_cache import compute_once
from phasetrain.addons.authoring.editor.schema import has_custom_parts, import_parts
from phasetrain.addons.authoring.editor.value_schemas import describe_values
from phasetrain.app.slots import list_slots
from phasetrain.config.compose.folders import find_config_dir
from phasetrain.config.compose.sources import ConfigFiles
from phasetrain.config.parts import RUN_FACTS
from phasetrain.config.problems import format_value
from phasetrain.config.registry import parameter_types, parameters
from phasetrain.config.schema import DEFAULT_NAMES, WORDS, default_schema
from phasetrain.config.validation import PartLocation

SHELLS = ("bash", "zsh")

LABELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"DATA.*": ("TRAIN", "TEST"), "OPTIMIZER.SCHEDULES.*": ("lr", "weight_decay")}
)
"""Place with a label -> labels that are completed; any others are possible."""


@dataclass(frozen=True)
class CommandWords:
    """A command, as a shell completes it.

    Attributes:
        name: one or two words.
        flags: words that begin with a dash.
        takes_folder: whether it takes a run folder.
        takes_overrides: whether it takes overrides.
        arguments: other words that it takes.
    """

    name: str
    flags: tuple[str, ...] = ()
    takes_folder: bool = False
    takes_overrides: bool = False
    arguments: tuple[str, ...] = ()

    def format_case(self) -> str:
        """Return the branch of the script for the words after the command."""
        wanted = list(self.arguments)
        if self.takes_overrides:
            wanted.append("$_phasetrain_keys")
        folder = ""  # the script tests whether it is empty
        if self.takes_folder:
            folder = "yes"
        return (
            f"        {self.name.replace(' ', ':')!r}) takes_folder={folder!r} "
            f'flags="{" ".join(self.flags)}" wanted="{" ".join(wanted)}" ;;'
        )


def completion_script(
    shell: str,
    commands: Sequence[CommandWords],
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> str:
    """Return a script that completes commands, flags, keys, values, options and run folders.

    Args:
        shell: one of SHELLS.
        commands: all commands, the default one first.
        overrides: overrides as on the command line; modules of RUN.imports register their parts.
        config_dir: folder with the user's configs.

    Raises:
        ConfigError: an override or a module of RUN.imports is wrong.
    """
    composed = import_parts(overrides, config_dir)
    options = ConfigFiles(find_config_dir(config_dir, overrides))
    keys = [f"{group}=" for group in options.groups()]
    values = [f"{group}={name}" for group in options.groups() for name in options.options(group)]
    for path, key in default_schema().keys.items():
        keys.append(f"{path}=")
        values += _list_choices(path, key.type.annotation)
    if has_custom_parts(composed):
        parts = list_part_words()
    else:
        parts = compute_once("words of parts", list_part_words)
    keys += parts["keys"]
    values += parts["values"]
    # bash inserts a word as it is, and zsh escapes it
    values.append("RUN.seed=seeds(5)" if shell == "zsh" else r"RUN.seed=seeds\(5\)")
    names = [command.name.replace(" ", ":") for command in commands]
    firsts = list(dict.fromkeys(name.partition(":")[0] for name in names))
    words = {
        "commands": dict.fromkeys([*firsts, *names]),
        "keys": dict.fromkeys(keys),
        "values": dict.fromkeys(values),
    }
    cases = [
        CommandWords("", commands[0].flags, takes_overrides=True, arguments=tuple(firsts)),
        *_group_commands(firsts, names),
        *commands,
    ]
    folder = files("phasetrain.addons.authoring.editor")
    text = folder.joinpath("completion.sh").read_text("utf-8")
    return "\n".join(
        [
            text.replace("@CASES@", "\n".join(case.format_case() for case in cases)),
            *(f"_phasetrain_{name}='{' '.join(listed)}'" for name, listed in words.items()),
            "",
            folder.joinpath(f"completion.{shell}").read_text("utf-8"),
        ]
    )


def list_part_words() -> dict[str, list[str]]:
    """Return the keys and values of all parts."""
    words: dict[str, list[str]] = {"keys": [], "values": []}
    for slot in list_slots():
        if slot.only is None:
            words["keys"] += _list_parameters(slot)
            words["values"] += _list_values(slot)
    return words


def _group_commands(firsts: Iterable[str], names: Sequence[str]) -> Iterator[CommandWords]:
    """Yield the first word of commands of two words, with the second words as arguments."""
    for first in firsts:
        seconds = [name.partition(":")[2] for name in names if name.startswith(f"{first}:")]
        if seconds:
            yield CommandWords(first, arguments=tuple(seconds))


def _list_places(slot: PartLocation, name: str) -> list[str]:
    """Return the paths at which a part can be set, with labels in place of `*`."""
    if slot.path in DEFAULT_NAMES:
        return [slot.path.replace("*", name)]
    for pattern, labels in LABELS.items():
        if slot.path.startswith(pattern):
            return [slot.path.replace("*", label, 1) for label in labels]
    if "*" in slot.path:
        return []  # labels of other optimizers, which only the user knows
    return [slot.path]


def _list_values(slot: PartLocation) -> Iterator[str]:
    """Yield the words that choose a part."""
    for name in slot.registry.names():
        for key_path in _list_places(slot, name):
            if slot.path in DEFAULT_NAMES:
                yield f"{key_path}={{}}"
            elif key_path.endswith("[]"):
                yield f"{key_path.removesuffix('[]')}=[{name}]"
            elif slot.path in WORDS:
                yield f"{key_path}={name}"
            else:
                yield f"{key_path}.{slot.key}={name}"
            for parameter, annotation in _select_parameters(slot, name).items():
                yield from _list_choices(f"{key_path}.{parameter}", annotation)


def _list_parameters(slot: PartLocation) -> Iterator[str]:
    """Yield the keys that are parameters of parts."""
    for name in slot.registry.names():
        for key_path in _list_places(slot, name):
            if not key_path.endswith("[]"):
                yield from (f"{key_path}.{key}=" for key in _select_parameters(slot, name))


def _select_parameters(slot: PartLocation, name: str) -> Mapping[str, Any]:
    """Return parameter -> annotation of a part, without those that the program sets."""
    if slot.path.endswith("[]"):
        return {}
    factory = slot.registry.find(name)
    types = parameter_types(factory)
    program = slot.provided | RUN_FACTS
    return {key: types.get(key, Any) for key in parameters(factory) if key not in program}


def _list_choices(path: str, annotation: Any) -> Iterator[str]:
    values = describe_values(annotation)
    for choice in values.choices:
        # Without the quotes that `format_value` gives a text: a shell would take them away.
        yield f"{path}={choice}" if isinstance(choice, str) else f"{path}={format_value(choice)}"
    if "boolean" in values.types:
        yield f"{path}=true"
        yield f"{path}=false"
