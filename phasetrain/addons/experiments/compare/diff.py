"""Compares two runs: the first update and component in which their ledgers differ, and differences
of config, environment and data."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from phasetrain.app.slots import list_slots
from phasetrain.checkpoint.commit import list_checkpoints
from phasetrain.config.changes import ABSENT, Change, compare_configs
from phasetrain.config.nested import leaves
from phasetrain.config.problems import format_value
from phasetrain.config.registry import parameters
from phasetrain.config.schema import DEFAULT_NAMES, PARTS, default_schema, matches, part_pattern
from phasetrain.errors import ConfigError
from phasetrain.hooks.observers import list_observers
from phasetrain.proof.causes import explain
from phasetrain.proof.compare import find_first_update
from phasetrain.runs.ledger import (
    COMPONENTS,
    FILE,
    FULL,
    SAMPLED,
    InvalidLedgerError,
    Ledger,
    is_comparable,
    parse_ledger,
)
from phasetrain.runs.records import METRICS, parse_metrics
from phasetrain.runs.view import RunView
from phasetrain.runtime.redaction import Redaction
from phasetrain.runtime.storage import Storage, open_storage
from phasetrain.runtime.terminal import Rows, plain_table

LENGTH = "length"
MEASUREMENTS = "metrics"
"""Further components: one run is longer; or the updates are equal and the metrics differ."""

COMPUTING = (
    "phasetrain",
    "python",
    "torch",
    "numpy",
    "machine",
    "device",
    "threads",
    "processes",
    "strategy",
    "packages",
    "commit",
    "devices",
    "switches",
)
"""Entries of environment.json that may change results bit by bit."""

OF_PROCESSES = ("DATA.TRAIN.micro_batch_size", "OPTIMIZER.accumulate")
"""Keys that follow from the world size."""

KEPT = ("phase", "reload")
"""Kinds of lines of metrics.jsonl that are always compared; other kinds only at updates at which
both runs have logged them."""


@dataclass(frozen=True)
class Side:
    """One of two compared runs.

    Attributes:
        path: its folder, or the file of its ledger.
        ledger: its ledger; None if it has none.
        config: content of config.yaml; empty if there is none.
        environment: content of environment.json; empty if there is none.
        data: split -> fingerprint of its data in the newest checkpoint; empty if there is none.
        code: module -> digest of the user's source in it; empty if there is none.
        observers: labels of the hooks that only observe, as far as they are known.
        metrics: lines of metrics.jsonl without entries that differ between equal runs.
    """

    path: str
    ledger: Ledger | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    data: Mapping[str, str]
    code: Mapping[str, str]
    observers: Collection[str]
    metrics: list[dict[str, Any]]


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing two runs.

    Attributes:
        one, other: the runs.
        updates: first update at which they differ; of a metric, the updates before it was
            measured; 0 if they are equal.
        components: components that differ there, causes before effects; empty if the runs are
            equal.
        verdict: a sentence that sums it up.
        config: keys that differ.
        environment: differences of versions, machine and threads, by name.
        data: splits whose data differ, with both fingerprints.
        code: modules of the user whose source differs, with both digests.
        notes: further remarks, such as parts that could not be compared.
    """

    one: Side
    other: Side
    updates: int
    components: tuple[str, ...]
    verdict: str
    config: tuple[Change, ...]
    environment: Mapping[str, tuple[Any, Any]]
    data: Mapping[str, tuple[Any, Any]]
    code: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not self.components

    def report(self, results: str = "") -> str:
        """Return everything as text.

        Args:
            results: text about the results of the runs. It follows the keys of the config that
                differ, and the first different update comes last.
        """
        rows = [
            (
                change.path,
                _format_side(change.path, change.old, self.one.config),
                _format_side(change.path, change.new, self.other.config),
                change.resume,
            )
            for change in self.config
        ]
        tables: list[tuple[str, Sequence[str], Rows]] = [
            ("config", ("key", "A", "B", "on a resume"), rows),
            ("environment", ("", "A", "B"), _make_rows(self.environment)),
            ("data", ("split", "A", "B"), _make_rows(self.data)),
            ("code", ("module", "A", "B"), _make_rows(self.code)),
        ]
        settings = [plain_table(title, head, rows) for title, head, rows in tables if rows]
        same = [title for title, _, rows in tables if not rows]
        if same:
            settings.append(f"equal: {', '.join(same)}")
        divergence = [self.verdict, *self._make_tables()]
        parts = [*divergence, *settings]
        if results:
            parts = [settings[0], results, *settings[1:], *divergence]
        return "\n\n".join([f"A {self.one.path}\nB {self.other.path}", *parts, *self.notes])

    def _make_tables(self) -> Iterator[str]:
        """Yield the table of the first different update, if there is one in the ledgers."""
        if not self.components or self.components[0] not in COMPONENTS:
            return
        # Length and metrics, which need no ledger, are no members of COMPONENTS.
        assert self.one.ledger is not None, "components of records need a ledger"
        assert self.other.ledger is not None, "components of records need a ledger"
        record = self.one.ledger[self.updates]
        other = self.other.ledger[self.updates]
        rows = [
            (
                name,
                record.format_component(name) or "-",
                other.format_component(name) or "-",
                "DIFFERENT" if name in self.components else "equal",
            )
            for name in COMPONENTS
        ]
        yield plain_table(f"update {self.updates}", ("", "A", "B", ""), rows)


def diff(one: str, other: str) -> RunComparison:
    """Compare two runs.

    Args:
        one: a run folder, or the path of a steps.ledger.
        other: the same of the other run.

    Raises:
        ConfigError: there is neither.
    """
    a = read_side(one)
    b = read_side(other)
    updates, components, verdict, notes = _find_difference(a, b)
    schema = default_schema()
    changes: Sequence[Change] = ()
    # A ledger alone has no config: every key would seem to differ from it.
    if a.config and b.config:
        hooks = {label for side in (a, b) for label in side.config.get("HOOKS", {})}
        observers = [
            label
            for label in hooks
            if all(
                label in side.observers for side in (a, b) if label in side.config.get("HOOKS", {})
            )
        ]
        changes = compare_configs(a.config, b.config, schema.with_observers(observers))
    # the settings of a rank follow from the world size
    has_same_size = a.environment.get("processes") == b.environment.get("processes")
    ignored = () if has_same_size else OF_PROCESSES
    return RunComparison(
        one=a,
        other=b,
        updates=updates,
        components=components,
        verdict=verdict,
        config=tuple(
            change
            for change in changes
            if change.path not in ignored and not schema.is_of_one_run(change.path)
        ),
        environment=_compare_leaves(
            _select_environment(a.environment, b.environment),
            _select_environment(b.environment, a.environment),
        ),
        data=_compare_leaves(a.data, b.data),
        code=_compare_leaves(a.code, b.code),
        notes=tuple(notes),
    )


def read_side(path: str) -> Side:
    """Read the run in a folder, or a ledger alone.

    Raises:
        ConfigError: there is no run (code `runs.no_run`), or a file of it cannot be read (code
            `runs.unreadable`).
    """
    try:
        return _read_side(open_storage(path), path.rstrip("/"))
    except OSError as error:
        raise ConfigError(
            f"{path!r}: a file of this run cannot be read ({error}); restore it, or delete it",
            code="runs.unreadable",
        ) from error
    except InvalidLedgerError as error:
        raise ConfigError(str(error), code="runs.unreadable") from error


def _read_side(storage: Storage, path: str) -> Side:
    names = storage.list_names(path)
    if not names:
        return Side(path, _read_ledger(storage, path), {}, {}, {}, {}, (), [])
    if FILE not in names and METRICS not in names:
        raise ConfigError(
            f"{path!r}: expected the folder of a run, or the path of a {FILE}", code="runs.no_run"
        )
    run = RunView(path, storage)
    config = Redaction({}).redact_config(run.config)
    metrics = run.read_bytes(METRICS)
    # Unlike in a report, this is an error: two runs could seem to be equal.
    if run.problems:
        raise ConfigError(
            f"{path}/{run.problems[0]} Restore it, or delete it", code="runs.unreadable"
        )
    promised = _read_promised(storage, f"{path}/checkpoints")
    return Side(
        path,
        run.ledger,
        config,
        run.environment.content,
        _read_mapping(promised, "data"),
        _read_mapping(promised, "code"),
        # The module of a custom hook is not imported here; the checkpoint says what its class is.
        {*list_observers(config), *promised.get("observers", ())},
        [line.comparable_content() for line in parse_metrics(metrics)],
    )


def _find_difference(one: Side, other: Side) -> tuple[int, tuple[str, ...], str, list[str]]:
    notes = [
        f"{a.path} has no {FILE} (HOOKS.ledger); only metrics are compared"
        for a in (one, other)
        if not a.ledger
    ]
    equal = 0
    if one.ledger and other.ledger:
        notes += _list_remarks(one.ledger, other.ledger)
        first = find_first_update(one.ledger, other.ledger)
        if first is not None:
            updates, components = first
            return (
                updates,
                components,
                _explain_difference(one.ledger, other.ledger, updates, components[0]),
                notes,
            )
        equal = len(one.ledger.keys() & other.ledger.keys())
        if one.ledger.last != other.ledger.last:
            last, longer = sorted((one.ledger.last, other.ledger.last))
            names = "B ends; A continues"
            if one.ledger.last == last:
                names = "A ends; B continues"
            verdict = f"They are equal up to update {last}, where {names} to update {longer}."
            return last + 1, (LENGTH,), verdict, notes
    same = "no updates were compared"
    if equal:
        same = f"their {equal} updates are equal"
    # Metrics come last: they follow from the updates, which name the cause more closely.
    metric = _find_first_metric(one.metrics, other.metrics)
    if metric is not None:
        updates, what = metric
        cause = explain("ledger.metrics")
        verdict = f"Their metrics differ after update {updates} ({what}), and {same}: {cause}."
        return updates, (MEASUREMENTS,), verdict, notes
    if not equal and not (one.metrics and other.metrics):
        return 0, (), "There is nothing to compare.", notes
    if equal:
        same = f"all {equal} updates"
        return 0, (), f"They are identical: {same} and all measured values are equal.", notes
    return 0, (), f"All measured values are equal; {same}.", notes


def _explain_difference(one: Ledger, other: Ledger, updates: int, component: str) -> str:
    before = max((number for number in one if number < updates and number in other), default=0)
    same = [
        f"same {name}"
        for name in COMPONENTS[: COMPONENTS.index(component)]
        if _can_compare(one, other, updates, name)
    ]
    if before:
        since = (
            f"Everything recorded was equal up to update {before}, including a sample of the "
            "weights"
        )
    else:
        since = "It is the first update, so the initial weights may differ as well"
    compared = ", ".join([*same, f"different {component}"])
    return (
        f"They diverge at update {updates}: {compared}. {since}; {explain(f'ledger.{component}')}."
    )


def _can_compare(one: Ledger, other: Ledger, updates: int, component: str) -> bool:
    """Return whether both records have the component and it was computed in the same way."""
    a = one[updates]
    b = other[updates]
    # A norm that neither run has computed is equal, and says nothing about the gradients.
    if component == "gradient norm":
        return a.format_component(component) != "not computed"
    if component == "batch content" and not a.flags & (SAMPLED | FULL):
        return False
    return is_comparable(a, b, component)


def _list_remarks(one: Ledger, other: Ledger) -> Iterator[str]:
    for name, ledger in (("A", one), ("B", other)):
        missing = ledger.last - len(ledger)
        if missing:
            yield f"{missing} updates are not in the ledger of {name}; they were not compared."
        if ledger.damaged:
            yield f"{len(ledger.damaged)} records in the ledger of {name} are damaged."
    both = [updates for updates in one if updates in other]
    # The first update speaks for all: the setting and the world size are those of the run.
    if any(
        not is_comparable(one[updates], other[updates], "batch content") for updates in both[:1]
    ):
        yield (
            "The content of batches was not compared: HOOKS.ledger.content or the number of "
            "processes differs."
        )
    for updates in both:
        a = one[updates]
        b = other[updates]
        # only a remark: the split of the data between phases may differ and the batches be the same
        if (a.phase, a.step) != (b.phase, b.step):
            yield (
                f"From update {updates} on the plans divide phases differently (A: phase "
                f"{a.phase}, step {a.step}; B: phase {b.phase}, step {b.step}); the updates may "
                "still be equal."
            )
            return


def _find_first_metric(
    one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> tuple[int, str] | None:
    if not one or not other:
        return None
    common = _list_common(one, other)
    for a, b in zip_longest(_select_lines(one, common), _select_lines(other, common)):
        if a == b:
            continue
        # one file is shorter: the run has ended earlier, or a kill has cost its last lines
        if a is None:
            return int(b["updates"]), f"only B has {_name_line(b)}"
        if b is None:
            return int(a["updates"]), f"only A has {_name_line(a)}"
        values = [f"{key}: {x!r} and {y!r}" for key, (x, y) in _compare_leaves(a, b).items()]
        return int(a["updates"]), f"{_name_line(a)}, {', '.join(values[:3])}"
    return None


def _list_common(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Return (kind, updates) of lines that both runs have logged; their hooks may differ."""
    logged = [{(line["kind"], line["updates"]) for line in side} for side in (one, other)]
    return logged[0] & logged[1]


def _select_lines(
    lines: list[dict[str, Any]], common: set[tuple[str, int]]
) -> list[dict[str, Any]]:
    return [
        line for line in lines if line["kind"] in KEPT or (line["kind"], line["updates"]) in common
    ]


def _name_line(line: Mapping[str, Any]) -> str:
    if line["kind"] == "phase":
        return f"{line.get('split')} of epoch {line.get('epoch')}"
    if line["kind"] == "reload":
        return f"reload of {line.get('file')}"
    return f"{line['kind']} of update {line['updates']}"


def _select_environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of COMPUTING that both environments have."""
    return {key: one[key] for key in COMPUTING if key in one and key in other}


def _compare_leaves(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the leaves of nested mappings that differ, with both values."""
    if not one or not other:
        return {}
    a = leaves(one)
    b = leaves(other)
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def _format_side(path: str, value: Any, config: Mapping[str, Any]) -> str:
    """Return the value of a key in one run; for a parameter of a part that this run leaves out, its
    default."""
    if value is not ABSENT:
        return format_value(value)
    part_path, _, name = path.rpartition(".")
    part = _find_part(part_path, config)
    if part is None:
        return format_value(value)
    # Only parts that are registered already: a comparison runs no code that a config names.
    registries = [slot.registry for slot in list_slots() if matches(part_path, slot.path)]
    factory = next((registry[part] for registry in registries if part in registry), None)
    if factory is None:
        return "default"
    accepted = parameters(factory)
    if name not in accepted:
        return format_value(value)
    return f"default ({format_value(accepted[name].default)})"


def _find_part(path: str, config: Mapping[str, Any]) -> str | None:
    """Return the name of the part at a path of a config; None if there is none."""
    pattern = part_pattern(path)
    if pattern is None:
        return None
    node: Any = config
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(node, str):
        return node
    if not isinstance(node, Mapping):
        return None
    part = node.get(PARTS[pattern])
    if part is None and any(matches(path, default) for default in DEFAULT_NAMES):
        part = path.rpartition(".")[2]
    return part if isinstance(part, str) else None


def _make_rows(values: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, str, str]]:
    return [(key, str(a), str(b)) for key, (a, b) in values.items()]


def _read_ledger(storage: Storage, path: str) -> Ledger:
    try:
        return parse_ledger(storage.read(path), path)
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, IsADirectoryError):
            reason = "the folder is empty"
        raise ConfigError(
            f"{path!r}: {reason}; expected the folder of a run, or the path of a {FILE}",
            code="runs.no_run",
        ) from error


def _read_promised(storage: Storage, root: str) -> dict[str, Any]:
    """Return promised.json of the newest checkpoint; empty without a checkpoint."""
    saved, _ = list_checkpoints(storage, root)
    content = storage.read_json(f"{root}/{saved[-1].name}/promised.json") if saved else None
    # A file of another form compares nothing, as if there were no checkpoint.
    return content if isinstance(content, dict) else {}


def _read_mapping(promised: Mapping[str, Any], key: str) -> Mapping[str, str]:
    content = promised.get(key)
    return content if isinstance(content, dict) else {}
