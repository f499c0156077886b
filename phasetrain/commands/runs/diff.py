"""Where two runs part: the first update and the component in which their ledgers differ, and what
differs beside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from phasetrain.checkpoint.commit import list_checkpoints
from phasetrain.config.changes import Change, differences
from phasetrain.config.problems import shown
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError
from phasetrain.runs.ledger import (
    COMPONENTS,
    FILE,
    FULL,
    SAMPLED,
    InvalidLedgerError,
    Ledger,
    is_comparable,
    list_differences,
    parse_ledger,
)
from phasetrain.runs.records import METRICS, RunFiles, parse_metrics
from phasetrain.runtime.storage import Storage, open_storage
from phasetrain.runtime.terminal import Rows, plain_table

LENGTH = "length"
MEASUREMENTS = "metrics"
"""Components beside those of a record: one run is longer; the updates are equal and measured values
are not."""

COMPUTING = (
    *(
        "phasetrain",
        "python",
        "torch",
        "numpy",
        "machine",
        "device",
        "threads",
        "processes",
        "strategy",
    ),
    *("packages", "commit", "devices", "switches"),
)
"""Entries of environment.json that may decide over bits; the others say who, where and when."""

OF_A_FOLDER = ("RUN.dir", "RUN.name", "RUN.engine", "RUN.step", "RUN.resume")
"""Keys that two runs may well have each their own way."""

OF_PROCESSES = ("DATA.TRAIN.micro_batch_size", "OPTIMIZER.accumulate")
"""Keys that follow from the number of processes."""

MEANINGS = {
    "samples": "the order of the data, its length, the batch size or the seed differs",
    "batch content": "the data itself, a transform or its randomness differs",
    "lr": "the learning rate or its schedule differs",
    "loss": "the forward pass differs: the loss or its parameters, the model, its randomness (dropout) or its buffers, "
    "the precision, the number of threads; or weights differ that are not on record",
    "gradient norm": "the backward pass differs, or only one of them limits the norm (OPTIMIZER.clip_norm)",
    "weights": "the update differs: the optimizer, its settings or its state (momentum), limits of the gradient, or "
    "one of them skipped it",
}
"""What it means that a component is the first to differ, everything before it being equal."""

KEPT = ("phase", "reload")
"""Kinds of lines of metrics.jsonl that are compared in any case; others where both runs have them
at an update."""

METER = "a meter, buffers of the model, the test data, or what a hook logs differs"
"""What it means that only measured values differ."""


@dataclass(frozen=True)
class Side:
    """What is known of one run.

    Attributes:
        path: its folder, or the file of its ledger.
        ledger: its records, None where there are none.
        config: the content of config.yaml, empty where there is none.
        environment: the content of environment.json, empty where there is none.
        data: split -> fingerprint of its data, of the newest checkpoint; empty where there is none.
        metrics: lines of metrics.jsonl without what may differ between equal runs.
    """

    path: str
    ledger: Ledger | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    data: Mapping[str, str]
    metrics: list[dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """How two runs compare.

    Attributes:
        one, other: the runs.
        updates: the first update at which they part; of a metric, the updates before it was
            measured; 0 where they are equal.
        components: what differs there, the cause before its effects; empty where they are equal.
        verdict: a sentence that says so.
        config: keys that differ.
        environment: what differs of versions, machine and threads, by name.
        data: splits whose data differ, with both fingerprints.
        notes: what else there is to know.
    """

    one: Side
    other: Side
    updates: int
    components: tuple[str, ...]
    verdict: str
    config: tuple[Change, ...]
    environment: Mapping[str, tuple[Any, Any]]
    data: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the runs do not part."""
        return not self.components

    def report(self) -> str:
        """Return everything as text."""
        lines = [self.verdict]
        if self.components and self.components[0] in COMPONENTS:
            lines.append(self._table())
        rows = [(c.path, shown(c.old), shown(c.new), c.resume) for c in self.config]
        tables: list[tuple[str, Sequence[str], Rows]] = [
            ("config", ("key", "A", "B", "on a resume"), rows),
            ("environment", ("", "A", "B"), _rows(self.environment)),
            ("data", ("split", "A", "B"), _rows(self.data)),
        ]
        lines += [plain_table(title, head, rows) for title, head, rows in tables if rows]
        same = [title for title, _, rows in tables if not rows]
        if same:
            lines.append(f"equal: {', '.join(same)}")
        return "\n\n".join([f"A {self.one.path}\nB {self.other.path}", *lines, *self.notes])

    def _table(self) -> str:
        assert self.one.ledger is not None, "they part in a ledger"
        assert self.other.ledger is not None, "they part in a ledger"
        one = self.one.ledger[self.updates]
        other = self.other.ledger[self.updates]
        rows = [
            (
                name,
                one.format_component(name) or "-",
                other.format_component(name) or "-",
                "DIFFERENT" if name in self.components else "equal",
            )
            for name in COMPONENTS
        ]
        return plain_table(f"update {self.updates}", ("", "A", "B", ""), rows)


def diff(one: str, other: str) -> Difference:
    """Return where two runs part.

    Args:
        one: a run folder, or the path of a steps.ledger.
        other: the same of another run.

    Raises:
        ConfigError: there is neither.
    """
    a = side(one)
    b = side(other)
    updates, components, verdict, notes = _parting(a, b)
    schema = default_schema()
    changes = differences(a.config, b.config, schema) if a.config and b.config else []
    other_number = a.environment.get("processes") != b.environment.get("processes")
    own = (*OF_A_FOLDER, *(OF_PROCESSES if other_number else ()))
    return Difference(
        one=a,
        other=b,
        updates=updates,
        components=components,
        verdict=verdict,
        config=tuple(change for change in changes if change.path not in own),
        environment=_unequal(
            _computing(a.environment, b.environment), _computing(b.environment, a.environment)
        ),
        data=_unequal(a.data, b.data),
        notes=tuple(notes),
    )


def side(path: str) -> Side:
    """Return what is known of the run in a folder, or of a ledger alone.

    Raises:
        ConfigError: there is no run, or something of it cannot be read.
    """
    try:
        return _read(open_storage(path), path.rstrip("/"))
    except OSError as error:
        raise ConfigError(
            f"{path!r}: a file of this run cannot be read ({error}); put a readable one there, or take it away"
        ) from error


def _read(storage: Storage, path: str) -> Side:
    names = storage.list_names(path)
    if not names:
        return Side(path, _ledger(storage, path), {}, {}, {}, [])
    if FILE not in names and METRICS not in names:
        raise ConfigError(f"{path!r}: expected the folder of a run, or the path of a {FILE}")
    try:
        config = OmegaConf.to_container(
            OmegaConf.create(
                _read_file(storage, path, "config.yaml", names).decode(errors="replace")
            )
        )
    except (OmegaConfBaseException, YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}/config.yaml cannot be read: {error}") from error
    environment = RunFiles(path, storage).environment()
    return Side(
        path,
        _ledger(storage, f"{path}/{FILE}") if FILE in names else None,
        {str(key): value for key, value in config.items()} if isinstance(config, dict) else {},
        environment.content,
        _fingerprints(storage, f"{path}/checkpoints"),
        [line.reproducible() for line in parse_metrics(_read_file(storage, path, METRICS, names))],
    )


def _parting(one: Side, other: Side) -> tuple[int, tuple[str, ...], str, list[str]]:
    notes = [
        f"{a.path} has no {FILE} (HOOKS.ledger); only metrics are compared"
        for a in (one, other)
        if not a.ledger
    ]
    equal = 0
    if one.ledger and other.ledger:
        notes += _remarks(one.ledger, other.ledger)
        first = _first(one.ledger, other.ledger)
        if first is not None:
            updates, components = first
            return (
                updates,
                components,
                _sentence(one.ledger, other.ledger, updates, components[0]),
                notes,
            )
        equal = len(one.ledger.keys() & other.ledger.keys())
        if one.ledger.last != other.ledger.last:
            last, longer = sorted((one.ledger.last, other.ledger.last))
            ends, goes_on = ("A", "B") if one.ledger.last == last else ("B", "A")
            verdict = f"They are equal up to update {last}, where {ends} ends; {goes_on} goes on to update {longer}."
            return last + 1, (LENGTH,), verdict, notes
    same = f"their {equal} updates are equal" if equal else "no updates were compared"
    found = _first_metric(one.metrics, other.metrics)
    if found is not None:
        updates, what = found
        verdict = (
            f"They part in what was measured after update {updates} ({what}), and {same}: {METER}."
        )
        return updates, (MEASUREMENTS,), verdict, notes
    if not equal and not (one.metrics and other.metrics):
        return 0, (), "There is nothing to compare.", notes
    return 0, (), f"They do not part: {same}, and so are all measured values.", notes


def _first(one: Ledger, other: Ledger) -> tuple[int, tuple[str, ...]] | None:
    for updates in one:
        if updates in other and (found := list_differences(one[updates], other[updates])):
            return updates, tuple(found)
    return None


def _sentence(one: Ledger, other: Ledger, updates: int, component: str) -> str:
    before = max((number for number in one if number < updates and number in other), default=0)
    same = [
        f"same {name}"
        for name in COMPONENTS[: COMPONENTS.index(component)]
        if _told(one, other, updates, name)
    ]
    if before:
        since = (
            f"Everything on record was equal up to update {before}, some of the weights included"
        )
    else:
        since = "It is the first update, so the initial weights may differ as well"
    beside = ", ".join([*same, f"other {component}"])
    return f"They part at update {updates}: {beside}. {since}; {MEANINGS[component]}."


def _told(one: Ledger, other: Ledger, updates: int, component: str) -> bool:
    """Tell whether both records have the component and it can be compared."""
    a = one[updates]
    b = other[updates]
    if component == "gradient norm":
        return a.format_component(component) != "not computed"
    if component == "batch content" and not a.flags & (SAMPLED | FULL):
        return False
    return is_comparable(a, b, component)


def _remarks(one: Ledger, other: Ledger) -> Iterator[str]:
    for name, ledger in (("A", one), ("B", other)):
        missing = ledger.last - len(ledger)
        if missing:
            yield f"{missing} updates are not in the ledger of {name}; they were not compared."
        if ledger.damaged:
            yield f"{len(ledger.damaged)} records in the ledger of {name} are damaged."
    both = [updates for updates in one if updates in other]
    if any(
        not is_comparable(one[updates], other[updates], "batch content") for updates in both[:1]
    ):
        yield "The content of batches was not compared: HOOKS.ledger.content or the number of processes differs."
    for updates in both:
        a = one[updates]
        b = other[updates]
        if (a.phase, a.step) != (b.phase, b.step):
            yield (
                f"From update {updates} on the plans cut phases at other places (A: phase {a.phase}, step {a.step}; "
                f"B: phase {b.phase}, step {b.step}); the updates may be equal all the same."
            )
            return


def _first_metric(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[int, str] | None:
    if not one or not other:
        return None
    common = _common(one, other)
    for a, b in zip_longest(_of(one, common), _of(other, common)):
        if a == b:
            continue
        if a is None or b is None:
            line, who = (b, "B") if a is None else (a, "A")
            return int(line["updates"]), f"only {who} has {_name(line)}"
        values = [f"{key}: {x!r} and {y!r}" for key, (x, y) in _unequal(_flat(a), _flat(b)).items()]
        return int(a["updates"]), f"{_name(a)}, {', '.join(values[:3])}"
    return None


def _common(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Return kind and update of what both have logged: hooks and their `every_updates` may
    differ."""
    logged = [{(line["kind"], line["updates"]) for line in side} for side in (one, other)]
    return logged[0] & logged[1]


def _of(lines: list[dict[str, Any]], common: set[tuple[str, int]]) -> list[dict[str, Any]]:
    return [
        line for line in lines if line["kind"] in KEPT or (line["kind"], line["updates"]) in common
    ]


def _name(line: Mapping[str, Any]) -> str:
    if line["kind"] == "phase":
        return f"{line.get('split')} of epoch {line.get('epoch')}"
    if line["kind"] == "reload":
        return f"reload of {line.get('file')}"
    return f"{line['kind']} of update {line['updates']}"


def _flat(value: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        found |= _flat(item, here) if isinstance(item, dict) else {here: item}
    return found


def _computing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an environment that may decide over bits and that both sides tell
    of."""
    return {key: one[key] for key in COMPUTING if key in one and key in other}


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the leaves that both sides have, or only one of them, with both values."""
    if not one or not other:
        return {}
    a = _flat(one)
    b = _flat(other)
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def _rows(found: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, str, str]]:
    return [(key, str(one), str(other)) for key, (one, other) in found.items()]


def _ledger(storage: Storage, path: str) -> Ledger:
    try:
        return parse_ledger(storage.read(path), path)
    except OSError as error:
        raise ConfigError(
            f"{path!r}: expected the folder of a run, or the path of a {FILE} ({error})"
        ) from error
    except InvalidLedgerError as error:
        raise ConfigError(str(error)) from error


def _read_file(storage: Storage, folder: str, name: str, names: list[str]) -> bytes:
    """Return the content of a file, empty if it is missing; unlike for a report, a file that cannot
    be read is an error: two runs could seem to be equal."""
    return storage.read(f"{folder}/{name}") if name in names else b""


def _fingerprints(storage: Storage, root: str) -> Mapping[str, str]:
    found, _ = list_checkpoints(storage, root)
    promised = storage.read_json(f"{root}/{found[-1].name}/promised.json") if found else None
    data = promised.get("data") if isinstance(promised, dict) else None
    if isinstance(data, dict):
        return data
    return {}
