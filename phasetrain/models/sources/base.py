"""What a source of weights is, as MODEL.weights describes it, and the registry of the formats that
one may have."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from phasetrain.config.registry import Registry
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.storage import HANDLERS, Storage, open_storage

KEY = "MODEL.weights"

Rename = tuple[str, str]
"""A regular expression and what takes the place of what it finds, as in `re.sub`."""


@dataclass(frozen=True)
class Source:
    """Where weights come from, and how their names become those of the model.

    Names change in this order: `prefix_remove`, `rename`, `prefix_add`; `include` and `exclude` see
    the new ones.

    Attributes:
        path: a file or folder of this machine, or `PREFIX://...` of a registered path handler.
        format: `auto`, or a name in `FORMATS`.
        which: the weights that were trained, or an average of them, as MODEL.ema and MODEL.swa make
            it.
        checkpoint: of a run folder, the newest checkpoint or the best one by the run's own monitor.
        key: dotted path of the weights in a torch file; None finds the usual ones.
        prefix_remove, prefix_add: taken off the names that begin with it, and put in front of all
            names.
        rename: regular expressions with what takes the place of what they find, one after the
            other.
        include: patterns (`*`, `?`, `[...]`) of names to take; empty takes all.
        exclude: patterns of names to leave.
        reinit: patterns of names of the model that keep the values they were initialised with.
        strict: refuse a model of which something has no source.
        skip_mismatched: leave tensors of another shape than the model's, instead of refusing them.
        where: config path, for messages.
    """

    path: str
    format: str = "auto"
    which: Literal["model", "ema", "swa"] = "model"
    checkpoint: Literal["latest", "best"] = "latest"
    key: str | None = None
    prefix_remove: str = ""
    prefix_add: str = ""
    rename: tuple[Rename, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    reinit: tuple[str, ...] = ()
    strict: bool = True
    skip_mismatched: bool = False
    where: str = KEY

    def storage(self) -> Storage:
        """Return the door to its files.

        Raises:
            ConfigError: no handler is registered for the prefix of the path.
        """
        prefix, separator, _ = self.path.partition("://")
        if separator and prefix not in HANDLERS:
            known = ", ".join(f"{name}://" for name in HANDLERS) or "none"
            raise self.refused(
                f"no path handler is registered for {prefix}://{did_you_mean(prefix, HANDLERS)} Known: {known}; "
                f"register an iopath handler with @phasetrain.runtime.storage.HANDLERS.register({prefix!r}) in a module of "
                "RUN.imports, or copy the file to this machine"
            )
        return open_storage(self.path)

    def refused(self, reason: str) -> ConfigError:
        """Return the error that says why the source cannot be used; without `where` no key is
        named."""
        key = f"{self.where}.path = " if self.where else ""
        return ConfigError(f"{key}{self.path!r}: {reason}")


@dataclass(frozen=True)
class Content:
    """What was read from a source.

    Attributes:
        tensors: name -> tensor, on the CPU.
        format: what it turned out to be.
        digest: of the content of its files, hexadecimal.
        path: what was read, such as the checkpoint that was chosen in a run folder.
    """

    tensors: Mapping[str, Tensor]
    format: str
    digest: str
    path: str


Reader = Callable[[Source, Storage], Content]
"""Reads a source; raises ConfigError for one that it cannot read."""

FORMATS: Registry[Content] = Registry("format of weights", f"{KEY}.format")
"""Readers by name: each takes a source and the door to its files."""


def sources_of(value: Any, where: str = KEY) -> tuple[Source, ...]:
    """Return the sources that a config names: none for null, one for a path or a mapping, several
    for a list.

    Raises:
        ConfigError: a key or a value that no source has; nothing has been opened.
    """
    if value is None:
        return ()
    if isinstance(value, str | Mapping):
        return (_source(value, where),)
    if not isinstance(value, Sequence) or not value:
        raise ConfigError(
            f"{where} = {value!r}: expected null, a path, a mapping with `path`, or a list of such"
        )
    return tuple(_source(one, f"{where}[{number}]") for number, one in enumerate(value))


def _source(value: Any, where: str) -> Source:
    given = {"path": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} = {value!r}: expected a path, or a mapping with `path`")
    known = [field.name for field in fields(Source) if field.name != "where"]
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{where}.{key}: a source of weights has no such key{did_you_mean(str(key), known) or '.'} "
                f"It takes: {', '.join(known)}"
            )
    if "path" not in given:
        raise ConfigError(f"{where}.path: a source of weights needs a path; set {where}.path=...")
    values = {key: _checked(key, one, f"{where}.{key}") for key, one in given.items()}
    found = Source(**values, where=where)
    if found.format != "auto":
        FORMATS.find(found.format, f"{where}.format")
    return found


def _checked(key: str, value: Any, where: str) -> Any:
    if key == "rename":
        return _renames(value, where)
    fits, expected = _KINDS[key]
    if not fits(value):
        raise ConfigError(f"{where} = {value!r}: expected {expected}")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return value


def _renames(value: Any, where: str) -> tuple[Rename, ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not _is_list(pairs) or not all(
        _is_list(pair) and len(pair) == 2 and all(map(_is_text, pair)) for pair in pairs
    ):
        raise ConfigError(
            f"{where} = {value!r}: expected a list of pairs [regular expression, replacement], such as "
            "[['^trunk[.]', 'features.']]"
        )
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{where}: {pattern!r} is no regular expression: {error}") from error
    return tuple((pattern, replacement) for pattern, replacement in pairs)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return _is_list(value) and all(map(_is_text, value))


_TEXT = (_is_text, "text")
_TEXTS = (_is_texts, "a list of patterns, such as ['head.*']")
_BOOL = (lambda value: isinstance(value, bool), "true or false")
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "path": (
            lambda value: isinstance(value, str) and bool(value),
            "the path of a file or folder",
        ),
        "format": _TEXT,
        "which": (lambda value: value in ("model", "ema", "swa"), "model, ema or swa"),
        "checkpoint": (lambda value: value in ("latest", "best"), "latest or best"),
        "key": (lambda value: value is None or isinstance(value, str), "text or null"),
        "prefix_remove": _TEXT,
        "prefix_add": _TEXT,
        "include": _TEXTS,
        "exclude": _TEXTS,
        "reinit": _TEXTS,
        "strict": _BOOL,
        "skip_mismatched": _BOOL,
    }
)
