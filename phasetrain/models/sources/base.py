"""Description of a source of weights (MODEL.weights), and the registry of its formats."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import Tensor

from phasetrain.config.registry import Registry
from phasetrain.config.sections.model import WhichWeights
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.storage import (
    HANDLERS,
    Storage,
    is_url,
    open_copies,
    open_storage,
    strip_file_scheme,
)
from phasetrain.runtime.storage.urls import redact_url, scheme_of, split_digest

KEY = "MODEL.weights"

Rename = tuple[str, str]
"""A regular expression and its replacement, as in `re.sub`."""


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from, and how their names map to the names of the model.

    Names change in this order: `prefix_remove`, `rename`, `prefix_add`; `include` and `exclude`
    apply to the new names.

    Attributes:
        path: a file or folder of this machine, a URL such as `https://...` or `s3://...`, or
            `PREFIX://...` of a registered path handler.
        sha256: expected SHA-256 of the file, hexadecimal; empty accepts any content.
        format: `auto`, or a name in `FORMATS`.
        which: the trained weights, or their average made by MODEL.ema, MODEL.swa or
            MODEL.schedule_free.
        checkpoint: of a run folder: the newest checkpoint, or the best one by the monitor of that
            run.
        key: dotted path of the weights in a torch file; None tries the usual ones.
        prefix_remove: prefix removed from names.
        prefix_add: prefix added to all names.
        rename: regular expressions and replacements, applied in order.
        include: patterns (`*`, `?`, `[...]`) of names to load; empty loads all.
        exclude: patterns of names to skip.
        reinit: patterns of model names that keep their initial values.
        strict: reject a model with tensors that have no source.
        skip_mismatched: skip tensors whose shape differs from the model instead of rejecting them.
        where: config path, for messages.
    """

    path: str
    sha256: str = ""
    format: str = "auto"
    which: WhichWeights = "model"
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

    def get_storage(self) -> Storage:
        """Return the storage with its files.

        Raises:
            ConfigError: no handler is registered for the prefix of the path, or a package for it is
                missing.
        """
        prefix = scheme_of(self.path)
        try:
            if not prefix or prefix in HANDLERS:
                return open_storage(self.path)
            return open_copies(self.path, self.sha256)
        except ConfigError as error:
            if error.code != "remote.unknown_scheme":
                raise
            schemes = ", ".join(f"{name}://" for name in (*HANDLERS, "http", "https", "s3"))
            near = did_you_mean(prefix, HANDLERS) or "."
            raise self.make_error(
                f"no path handler is registered for {prefix}://{near} "
                f"Known: {schemes}; register an iopath handler with "
                f"@phasetrain.runtime.storage.HANDLERS.register({prefix!r}) in a module of "
                "RUN.imports, or copy the file to this machine"
            ) from error

    def check_exists(self) -> Storage:
        """Return the storage with its files.

        Raises:
            ConfigError: there is no such file or folder, or no handler for its prefix.
        """
        storage = self.get_storage()
        if not storage.exists(self.path):
            parent, _, name = self.path.rstrip("/").rpartition("/")
            near = did_you_mean(name, storage.list_names(parent or "."))
            raise self.make_error(f"there is no such file or folder{near or '; check the path'}")
        return storage

    def make_error(self, reason: str, code: str = "weights.unusable") -> ConfigError:
        """Return the error for a source that cannot be used; without `where` it names no key."""
        key = f"{self.where}.path = " if self.where else ""
        return ConfigError(f"{key}{redact_url(self.path)!r}: {reason}", code=code)


@dataclass(frozen=True)
class SourceContent:
    """The content of a source.

    Attributes:
        tensors: name -> tensor, on the CPU.
        format: the format that was detected.
        digest: hexadecimal digest of the content of its files.
        path: the path that was read, such as the selected checkpoint of a run folder.
    """

    tensors: Mapping[str, Tensor]
    format: str
    digest: str
    path: str


FORMATS: Registry[SourceContent] = Registry("format of weights", f"{KEY}.format")
"""Readers by name: each takes a source and the storage with its files."""


def parse_sources(value: Any, where: str = KEY) -> tuple[WeightSource, ...]:
    """Return the sources in a config: none for null, one for a path or a mapping, several for a
    list.

    Raises:
        ConfigError: an unknown key or invalid value; nothing has been opened yet.
    """
    if value is None:
        return ()
    if isinstance(value, str | Mapping):
        return (_parse_source(value, where),)
    if not isinstance(value, Sequence) or not value:
        raise ConfigError(
            f"{where} = {value!r}: expected null, a path, a mapping with `path`, or a list of "
            "these",
            code="config.wrong_type",
        )
    return tuple(_parse_source(entry, f"{where}[{number}]") for number, entry in enumerate(value))


def _parse_source(value: Any, where: str) -> WeightSource:
    section = {"path": value} if isinstance(value, str) else value
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{where} = {value!r}: expected a path, or a mapping with `path`",
            code="config.wrong_type",
        )
    names = [field.name for field in fields(WeightSource) if field.name != "where"]
    for key in section:
        if key not in names:
            near = did_you_mean(str(key), names) or "."
            raise ConfigError(
                f"{where}.{key}: a source of weights has no such key{near} "
                f"It takes: {', '.join(names)}",
                code="config.unknown_key",
            )
    if "path" not in section:
        raise ConfigError(
            f"{where}.path: a source of weights needs a path; set {where}.path=...",
            code="config.missing_key",
        )
    values = {key: _parse_value(key, item, f"{where}.{key}") for key, item in section.items()}
    values["path"] = strip_file_scheme(values["path"])
    if is_url(values["path"]):
        values["path"], digest = split_digest(values["path"])
        # The key counts if the digest is given in the URL as well.
        values.setdefault("sha256", digest)
    source = WeightSource(**values, where=where)
    if source.format != "auto":
        FORMATS.find(source.format, f"{where}.format")
    return source


def _parse_value(key: str, value: Any, where: str) -> Any:
    if key == "rename":
        return _parse_renames(value, where)
    fits, expected = _KINDS[key]
    if not fits(value):
        raise ConfigError(f"{where} = {value!r}: expected {expected}", code="config.wrong_type")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return value


def _parse_renames(value: Any, where: str) -> tuple[Rename, ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not _is_list(pairs) or not all(
        _is_list(pair) and len(pair) == 2 and all(map(_is_text, pair)) for pair in pairs
    ):
        raise ConfigError(
            f"{where} = {value!r}: expected a list of pairs [regular expression, replacement], "
            "such as [['^trunk[.]', 'features.']]",
            code="config.wrong_type",
        )
    for pattern, _ in pairs:
        try:
            # Compiled now, so that a wrong pattern is reported before a large file is read.
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{where}: {pattern!r} is not a regular expression: {error}",
                code="config.wrong_type",
            ) from error
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
        "sha256": (
            lambda value: _is_text(value) and re.fullmatch("[0-9a-f]{64}", value) is not None,
            "64 hexadecimal digits in lower case, as printed by sha256sum",
        ),
        "format": _TEXT,
        "which": (
            lambda value: value in get_args(WhichWeights),
            "model, ema, swa or schedule_free",
        ),
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
