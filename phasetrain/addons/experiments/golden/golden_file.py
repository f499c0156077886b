"""The file of a golden run: one record per platform, as JSON to commit."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import Storage

FORMAT = 1
"""Version of the file; raised if a key is renamed or removed."""


@dataclass(frozen=True)
class GoldenRecord:
    """The run on one platform.

    Attributes:
        overrides: the words of the command line that describe the run, without secrets.
        config_dir: folder with custom configs, as given; None: the default.
        updates: requested number of updates; None: the default.
        config: path -> value of each config value that affects results and differs from the
            defaults.
        config_sha256: digest of all config values that affect results.
        sources: module -> SHA-256 of its source, for the modules of the user's parts.
        facts: device, processor and versions, as a certificate has them.
        start: digest of the initial weights; empty without a ledger.
        ledger_root: hash of the chain of the ledger; empty without a ledger.
        steps: digests of each step and each end of a phase by component, with `update` and `at`.
    """

    overrides: list[str]
    config_dir: str | None
    updates: int | None
    config: Mapping[str, Any]
    config_sha256: str
    sources: Mapping[str, str]
    facts: Mapping[str, Mapping[str, Any]]
    start: str
    ledger_root: str
    steps: list[Mapping[str, Any]]


def read_golden(path: str) -> dict[str, GoldenRecord]:
    """Return platform -> record of a file.

    Raises:
        ConfigError: it does not exist (code `golden.missing`), is not a golden run or damaged
            (`golden.unreadable`), or has another format (`golden.format`).
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file; record it with `phasetrain golden record ... --out {path}`, "
            "and commit it",
            code="golden.missing",
        ) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(content, dict) or "format" not in content:
        raise _unreadable(path, "it has no `format`")
    if content["format"] != FORMAT:
        raise ConfigError(
            f"{path} has format {content['format']!r}: expected {FORMAT}; record it again with "
            "`phasetrain golden record` of this version",
            code="golden.format",
        )
    try:
        return {key: _parse_record(entry) for key, entry in content["platforms"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def write_golden(path: str, records: Mapping[str, GoldenRecord]) -> None:
    """Write the records to a file."""
    platforms = {key: asdict(record) for key, record in sorted(records.items())}
    Storage().replace_json(path, {"format": FORMAT, "platforms": platforms}, durable=False)


def _parse_record(entry: Mapping[str, Any]) -> GoldenRecord:
    record = GoldenRecord(**{item.name: entry[item.name] for item in fields(GoldenRecord)})
    types = {
        "overrides": list,
        "config": dict,
        "sources": dict,
        "facts": dict,
        "steps": list,
    }
    for name, expected in types.items():
        if not isinstance(entry[name], expected):
            raise TypeError(f"`{name}` is {entry[name]!r}")
    for step in record.steps:
        step["update"], step["at"]
    for part in ("machine", "versions"):
        record.facts[part].items()
    return record


def _unreadable(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: expected the file of a golden run: {reason}; restore it, or delete it and record "
        "it again with `phasetrain golden record`",
        code="golden.unreadable",
    )
