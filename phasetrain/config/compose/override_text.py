"""Write a mapping as overrides of the command line, so that both are composed the same way."""

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from phasetrain.config.compose.folders import EXPERIMENT, is_file_word
from phasetrain.errors import ConfigError

_SPECIAL = re.compile(r"([\\()\[\]{}:=,\s])")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.-]*/[A-Za-z0-9_./-]+")
_QUOTE = re.compile(r"(\\*)'")
_END = re.compile(r"(\\+)$")


def format_overrides(config: Mapping[str, Any]) -> list[str]:
    """Return the overrides that are equivalent to a mapping.

    Args:
        config: section -> its keys, nested as in a file (`{"OPTIMIZER": {"lr": 0.1}}`), or dotted
            paths (`{"OPTIMIZER.lr": 0.1}`); a section with a text (`{"MODEL": "resnet20"}`) and
            `experiment` choose files.

    Raises:
        ConfigError: a value that no config can hold.
    """
    overrides = []
    for key, value in config.items():
        if isinstance(value, Mapping) and "." not in key:
            # Names that are not identifiers cannot be part of a dotted path.
            plain = all(_IDENTIFIER.fullmatch(str(name)) for name in value)
            each = [
                f"{key}.{name}={format_literal(item, f'{key}.{name}')}"
                for name, item in value.items()
            ]
            overrides += each if plain else [f"{key}={format_literal(value, key)}"]
        elif isinstance(value, str) and "." not in key:
            overrides.append(f"{key}={value}")
        else:
            overrides.append(f"{key}={format_literal(value, key)}")
    return overrides


def format_literal(value: Any, path: str) -> str:
    """Return a value in Hydra's override grammar.

    Args:
        value: None, a bool, a number, a text, a path, or a mapping or list of such.
        path: dotted path of the key, for messages.

    Raises:
        ConfigError: it is none of these.

    Example:
        >>> format_literal({"name": "step", "every": [1, None]}, "LOSS")
        "{name: 'step', every: [1, null]}"
    """
    if value is None:
        return "null"
    # Before the numbers, since bool is a subclass of int.
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value + 0)  # + 0 turns an IntEnum into a plain int
    if isinstance(value, str | PathLike):
        return quote_text(str(value))
    if isinstance(value, Mapping):
        entries = (
            f"{_key(key)}: {format_literal(item, f'{path}.{key}')}" for key, item in value.items()
        )
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, Sequence):
        items = (format_literal(item, f"{path}[{number}]") for number, item in enumerate(value))
        return "[" + ", ".join(items) + "]"
    raise ConfigError(
        f"{path} = {value!r}: expected a number, a text, true, false, null, or a list or mapping "
        f"of them, not {type(value).__name__}"
    )


def key_of(word: str) -> str:
    """Return the key of an override; a word that is an experiment file sets `experiment`."""
    if is_file_word(word):
        return EXPERIMENT
    return word.lstrip("+~").partition("=")[0]


def list_repeated(words: Sequence[str]) -> list[str]:
    """Return a sentence for each key that several overrides set to different values."""
    values_by_key: dict[str, list[str]] = {}
    for word in words:
        value = word if is_file_word(word) else word.partition("=")[2]
        # Mappings are merged, and `~` removes on purpose what was set before.
        if not word.startswith("~") and not value.startswith("{"):
            values_by_key.setdefault(key_of(word), []).append(value)
    return [
        f"{key} is given {len(values)} times ({', '.join(values)}); the last one counts"
        for key, values in values_by_key.items()
        if len(set(values)) > 1
    ]


def quote_text(text: str) -> str:
    """Return a quoted string in Hydra's grammar, in which a backslash escapes only before a
    quote."""
    inner = _END.sub(r"\1\1", _QUOTE.sub(r"\1\1\\'", text))
    return f"'{inner}'"


def quote_value(text: str) -> str:
    """Return a text as a value that Hydra reads as this text; plain paths stay as they are."""
    if _PLAIN_PATH.fullmatch(text):
        return text
    return quote_text(text)


def _key(name: object) -> str:
    text = str(name)
    if _IDENTIFIER.fullmatch(text):
        return text
    return _SPECIAL.sub(r"\\\1", text)
