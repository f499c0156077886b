"""A run on disk: everything that its folder says about it, read when it is asked for.

Reading never fails because of the content: a file that is missing, torn by a kill, edited by hand
or written by another version gives an empty record, and `RunView.problems` says so. The ledger is
the exception, because a comparison must not take a damaged one for an empty one. Nothing here
imports torch: a thousand folders are listed in seconds.
"""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from phasetrain.runs.records import (
    ATTEMPTS,
    ENVIRONMENT,
    METRICS,
    PLAN,
    READ_ERRORS,
    STATUS,
    EnvironmentRecord,
    MetricsLine,
    PlanRecord,
    StatusRecord,
    parse_mapping,
    parse_metrics_line,
    shorten_error,
)
from phasetrain.runtime.storage import Storage, open_storage

if TYPE_CHECKING:
    from phasetrain.runs.ledger import Ledger

CONFIG = "config.yaml"
OVERRIDES = "overrides.yaml"
LEDGER = "steps.ledger"

_END_OF_SECTION = re.compile(r"\n(?=[^\s#-])")


def _make_loader(base: Any) -> Any:
    """Return a YAML loader for the values of a config: 1e-3 is a number, a date is a text, and a
    repeated key is an error."""

    class ConfigLoader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
            keys = [key.value for key, _ in node.value]
            if len(set(keys)) < len(keys):
                raise yaml.YAMLError(f"a key is repeated {node.start_mark}")
            return super().construct_mapping(node, deep)

    ConfigLoader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    ConfigLoader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*\.?[0-9_]*[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    return ConfigLoader


# libyaml takes a tenth of the time, and rejects a path with bytes that are no text.
_LOADERS = [
    _make_loader(vars(yaml)[name]) for name in ("CSafeLoader", "SafeLoader") if name in vars(yaml)
]


class RunView:
    """A run on disk, without its lock.

    Each property is read once: a command that waits for a run makes a new view for each look.

    Args:
        folder: path of the run folder.
        storage: access to its files; chosen by the path by default.

    Attributes:
        path: the run folder, without a slash at its end.
        storage: access to its files.
        problems: a sentence per file that could not be read.
    """

    def __init__(self, folder: str | Path, storage: Storage | None = None) -> None:
        self.path = str(folder).rstrip("/") or "/"
        self.storage = storage or open_storage(self.path)
        self.problems: list[str] = []

    def file(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.path}/{name}"

    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file; empty if it is missing or cannot be read."""
        try:
            return self.storage.read(self.file(name))
        except FileNotFoundError:
            # no problem to report: a young run has not written all of its files yet
            return b""
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror or error}.")
            return b""

    def read_mapping(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file that holds an object; empty if it is damaged."""
        data = self.read_bytes(name)
        if not data:
            return {}
        try:
            content = json.loads(data)
        except READ_ERRORS as error:
            self.problems.append(f"{name} cannot be read: {shorten_error(error)}.")
            return {}
        if not isinstance(content, dict):
            self.problems.append(f"{name} contains {type(content).__name__}, expected a mapping.")
            return {}
        return content

    def _parse_yaml(self, name: str, text: str) -> Any:
        reason = ""
        for loader in _LOADERS:
            try:
                return yaml.load(text, loader)
            except (*READ_ERRORS, yaml.YAMLError) as error:
                reason = shorten_error(error)
        self.problems.append(f"{name} cannot be read: {reason}.")
        return None

    @cached_property
    def config_text(self) -> str:
        """Content of config.yaml; empty if it is missing."""
        # "replace": a flipped byte costs its key, and the rest can be compared
        return self.read_bytes(CONFIG).decode(errors="replace")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config; empty if it is missing or damaged."""
        return parse_mapping(self._parse_yaml(CONFIG, self.config_text))

    @cached_property
    def monitor(self) -> str | None:
        """CHECKPOINT.best.monitor; None if none is set.

        Only this section is parsed, in a third of the time: a list of runs reads it of each run.
        """
        # A line of another section that begins like this is indented.
        _, _, rest = f"\n{self.config_text}".partition("\nCHECKPOINT:")
        section = parse_mapping(self._parse_yaml(CONFIG, _END_OF_SECTION.split(rest, 1)[0]))
        monitor = parse_mapping(section.get("best")).get("monitor")
        if isinstance(monitor, str) and monitor != "auto":
            return monitor
        return None

    @cached_property
    def overrides(self) -> list[str]:
        """Words of the newest command; empty if they are missing or damaged."""
        content = self._parse_yaml(OVERRIDES, self.read_bytes(OVERRIDES).decode(errors="replace"))
        return [str(word) for word in content] if isinstance(content, list) else []

    @cached_property
    def status(self) -> StatusRecord:
        """Content of status.json."""
        return StatusRecord.from_json(self.read_mapping(STATUS))

    @cached_property
    def plan(self) -> PlanRecord:
        """Content of plan.json."""
        return PlanRecord.from_json(self.read_mapping(PLAN))

    @cached_property
    def environment(self) -> EnvironmentRecord:
        """Content of environment.json."""
        return EnvironmentRecord.from_json(self.read_mapping(ENVIRONMENT))

    @cached_property
    def attempts(self) -> list[StatusRecord]:
        """One record per attempt, in their order: earlier ones from attempts.jsonl, the last one
        from status.json."""
        earlier = (_load_line(line) for line in self.read_bytes(ATTEMPTS).splitlines())
        records = [*(StatusRecord.from_json(content) for content in earlier), self.status]
        # The last record of a number wins: a kill between the two files leaves an attempt in both.
        by_number = {record.attempt: record for record in records if record.attempt}
        return [by_number[number] for number in sorted(by_number)]

    @cached_property
    def lines(self) -> list[MetricsLine]:
        """Lines of metrics.jsonl; those torn by a kill, or of an unknown form, are skipped."""
        return self.parse_lines(self.read_bytes(METRICS).splitlines())

    def parse_lines(self, lines: Iterable[bytes]) -> list[MetricsLine]:
        """Return lines of metrics.jsonl without damaged ones, which are counted in `problems`."""
        records = [parse_metrics_line(line) for line in lines]
        if damaged := records.count(None):
            self.problems.append(f"{damaged} lines of {METRICS} are damaged and were skipped.")
        return [record for record in records if record is not None]

    @cached_property
    def ledger(self) -> "Ledger | None":
        """The ledger; None if the run has none.

        Raises:
            OSError: it cannot be read.
            InvalidLedgerError: it is not a ledger, or of a later version.
        """
        from phasetrain.runs.ledger import parse_ledger  # numpy, which no list of runs needs

        path = self.file(LEDGER)
        try:
            content = self.storage.read(path)
        except FileNotFoundError:
            return None
        return parse_ledger(content, path)


def _load_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except READ_ERRORS:
        return None


def read_status(folder: str | Path, storage: Storage | None = None) -> StatusRecord:
    """Return the status of the run in a folder; an empty record if there is none."""
    return RunView(folder, storage).status
