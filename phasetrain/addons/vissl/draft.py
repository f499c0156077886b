"""The experiment that a converter writes, and the fate of each key that it read."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from omegaconf import OmegaConf

from phasetrain.addons.vissl.compose import VisslConfig, read_defaults

Status = Literal["translated", "renamed", "not needed", "missing"]
"""What became of a key."""

NOT_NEEDED = "not needed"
NONE = "none"
COPY = "= "
"""First words of entries of the key table; see `vissl_keys.yaml`."""


@dataclass(frozen=True)
class KeyReport:
    """The result for one key of a config.

    Attributes:
        key: key of VISSL.
        value: its value in the files.
        status: translated, renamed, not needed or missing.
        text: the keys that replace it, or the reason.
    """

    key: str
    value: Any
    status: Status
    text: str


class ExperimentDraft:
    """An experiment in the making.

    Args:
        source: the config that is converted.

    Attributes:
        experiment: sections of the experiment.
        notes: differences and open ends, as sentences.
        head_rules: pairs of a regular expression, which fits VISSL's name of a weight of a head,
            and the name here; empty: the head has no weights, or none that fit.
        head_pattern: pattern over the names of the weights of the head; None: there is none.
        head_has_norms: whether the head has norms.
    """

    def __init__(self, source: VisslConfig) -> None:
        self.source = source
        self.experiment: dict[str, Any] = {}
        self.notes: list[str] = []
        self.head_rules: list[tuple[str, str]] = []
        self.head_pattern: str | None = None
        self.head_has_norms = False
        self._targets: dict[str, str] = {}
        self._missing: dict[str, str] = {}
        self._needless: dict[str, str] = {}
        self._inactive: dict[str, str] = {}

    def put(self, target: str, value: Any, *keys: str) -> None:
        """Set a key of the experiment, as the translation of keys of VISSL."""
        section = self.experiment
        *parents, last = target.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        self.translate(target, *keys)

    def translate(self, target: str, *keys: str) -> None:
        """Record which key of the experiment replaces keys of VISSL."""
        for key in keys:
            # Several keys may replace one of VISSL's: the report names all of them.
            targets = self._targets.get(key)
            self._targets[key] = target if targets in (None, target) else f"{targets}, {target}"

    def miss(self, reason: str, *keys: str) -> None:
        """Record that keys have no counterpart, with the reason."""
        for key in keys:
            self._missing[key] = reason

    def skip(self, reason: str, *keys: str) -> None:
        """Record that keys need no counterpart, with the reason."""
        for key in keys:
            self._needless[key] = reason

    def deactivate(self, prefix: str, reason: str) -> None:
        """Record that VISSL does not use the keys below a prefix in this config."""
        self._inactive[prefix] = reason

    def note(self, text: str) -> None:
        """Add a sentence to the report."""
        if text not in self.notes:
            self.notes.append(text)

    def list_keys(self) -> list[KeyReport]:
        """Return the result for each key of the files; none is left out."""
        return [self._judge(key, value) for key, value in self.source.given.items()]

    def _judge(self, key: str, value: Any) -> KeyReport:
        # What the converters say about this config wins over the table, and a gap over all else.
        row = find_row(key)
        for reasons, status in (
            (self._missing, "missing"),
            (self._targets, "translated"),
            (self._needless, NOT_NEEDED),
        ):
            if key in reasons:
                if status == "translated" and row is not None and row.startswith(COPY):
                    status = "renamed"
                return KeyReport(key, value, status, reasons[key])  # type: ignore[arg-type]
        for prefix, reason in self._inactive.items():
            if key.startswith(prefix):
                return KeyReport(key, value, "not needed", reason)
        # VISSL merges files without a schema: a misspelt key has no effect there either.
        if row is None:
            text = "VISSL reads no such key; check its spelling"
            return KeyReport(key, value, "not needed", text)
        if row.startswith(NOT_NEEDED):
            return KeyReport(key, value, "not needed", row.removeprefix(f"{NOT_NEEDED}: "))
        # After `not needed`, whose reason says more than this one.
        if not self.source.is_changed(key):
            return KeyReport(key, value, "not needed", "VISSL's default, which changes nothing")
        if row.startswith(NONE):
            return KeyReport(key, value, "missing", row.removeprefix(f"{NONE}: "))
        text = f"not converted in this config; its counterpart is {row.removeprefix(COPY)}"
        return KeyReport(key, value, "missing", text)


@cache
def read_key_table() -> dict[str, str]:
    """Return the table of keys: key or pattern of VISSL -> counterpart or reason."""
    text = files(__package__).joinpath("vissl_keys.yaml").read_text()
    table: dict[str, str] = OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[assignment]
    return table


def find_row(key: str) -> str | None:
    """Return the entry of the table for a key: an exact one, else the first pattern that fits."""
    table = read_key_table()
    # Exact keys first, because patterns such as `DISTRIBUTED.*` are for all others.
    if key in table:
        return table[key]
    return next((row for pattern, row in table.items() if fnmatchcase(key, pattern)), None)


def copy_keys(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Copy all changed keys whose value stays the same."""
    for key in source.given:
        row = find_row(key)
        if row is not None and row.startswith(COPY) and source.is_changed(key):
            draft.put(row.removeprefix(COPY), source.get(key), key)


def list_table_rows() -> list[tuple[str, str]]:
    """Return each default key of VISSL with its entry, then the other rows, for the docs."""
    table = read_key_table()
    rows = [(key, find_row(key) or "") for key in read_defaults()]
    default_keys = {key for key, _ in rows}
    return rows + [
        (key, row) for key, row in table.items() if "*" not in key and key not in default_keys
    ]


def format_row(row: str) -> str:
    """Return an entry of the table without its mark."""
    return row.removeprefix(COPY)


def to_yaml(content: Mapping[str, Any]) -> str:
    """Return sections as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(content)))
