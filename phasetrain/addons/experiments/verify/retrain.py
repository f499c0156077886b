"""Train a segment of a run again, and compare it with the ledger and with the next checkpoint."""

import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from phasetrain.addons.experiments.replay.updates import (
    ReplayStart,
    find_content,
    replay_updates,
    select_components,
    start_at,
)
from phasetrain.addons.experiments.verify.evidence import Evidence, Finding, count_updates
from phasetrain.addons.experiments.verify.segments import Segment
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.app.stored.stored_config import (
    StoredConfig,
    read_loaded_config,
    read_newest_command,
)
from phasetrain.app.train.resume import (
    check_data_changes,
    describe_environment,
    list_config_changes,
    list_packages,
)
from phasetrain.app.train.source_code import list_source_changes
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.codec import flatten_state
from phasetrain.checkpoint.commit import Saved
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.checkpoint.promised import FOLDER, read_promised
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.config.compose.override_text import quote_value
from phasetrain.config.problems import format_value
from phasetrain.config.trust import trust_only
from phasetrain.engine.plan import Plan
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ChangedError
from phasetrain.hooks import Hook, Run
from phasetrain.hooks.ledger import Content
from phasetrain.models.digest import hash_state
from phasetrain.proof.compare import find_first_update, is_equal
from phasetrain.proof.positions import StepPosition
from phasetrain.runs.ledger import COMPONENTS, UNKNOWN_START, Ledger
from phasetrain.runs.records import StatusRecord
from phasetrain.runtime.environment import describe_platform
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import SplitData

COMPARED = ("python", "torch", "numpy", "machine", "device", "threads")
"""Entries of a recorded environment that the bits depend on."""

OF_RANKS = ("generators", "logs")
"""Parts of the state of a task that each rank has for itself, besides its meters."""

MAX_LISTED = 3
"""Maximum number of tensors that are named."""


@dataclass(frozen=True)
class Retrained:
    """The outcome of training one segment again.

    Attributes:
        segment: the segment.
        components: components of the records that were compared; empty if the segment could not be
            trained again.
        records: number of updates whose records were compared.
        weights: checkpoints whose learned state was compared, by name.
        missed: checkpoints that should have been compared too, and are at a place that the training
            did not reach again.
        findings: differences, in the order of the updates; empty if there are none.
        excuses: why a difference would prove nothing: the machine or the world size is another one.
    """

    segment: Segment
    components: tuple[str, ...]
    records: int
    weights: tuple[str, ...]
    missed: tuple[str, ...]
    findings: tuple[Finding, ...]
    excuses: tuple[str, ...]

    @property
    def compares_bits(self) -> bool:
        """Whether all components were compared, see `select_components`."""
        return self.components == COMPONENTS


@dataclass
class Retrainer:
    """Trains segments of one run again; its data is opened once.

    Args:
        evidence: the files of the run.
        trust: run the code that the config of the run names.
        is_finished: the run says that it has ended, so it may not continue if it is trained again.
    """

    evidence: Evidence
    trust: bool = False
    is_finished: bool = False
    _packages: dict[str, str | None] = field(default_factory=list_packages)
    _opened: dict[str, tuple[Setup, Mapping[str, SplitData]]] = field(default_factory=dict)

    def retrain(self, segment: Segment) -> Retrained:
        """Train a segment again and compare it.

        Raises:
            ChangedError: the data, the user's code or the config has changed since the run.
            ConfigError: the run cannot be built here.
        """
        reader = CheckpointReader(f"{self.evidence.folder}/{FOLDER}", self.evidence.storage)
        begin = self._load(reader, segment.begin)
        ends = [self._load(reader, checkpoint) for checkpoint in segment.ends]
        loaded = [checkpoint for checkpoint in (*ends, begin) if checkpoint is not None]
        setup, data = self._open(loaded)
        with trust_only(setup.trusted_paths):
            return self._compare(segment, setup, data, begin, loaded)

    def _compare(
        self,
        segment: Segment,
        setup: Setup,
        data: Mapping[str, SplitData],
        begin: LoadedCheckpoint | None,
        loaded: list[LoadedCheckpoint],
    ) -> Retrained:
        recorded = [checkpoint.promised for checkpoint in loaded] or [self._read_environment()]
        for checkpoint in loaded:
            _check_unchanged(setup, checkpoint, data)
        if begin is None:
            machine = _match_threads(setup, recorded[0])
            start = ReplayStart(setup.builder().plan(data), RunState(), machine)
        elif problems := tuple(_check_begin(segment, setup, begin)):
            return Retrained(segment, (), 0, (), (), problems, ())
        else:
            start = start_at(setup, data, begin)
        ledger = self.evidence.ledger
        # From the ledger rather than the environment, which is that of the newest attempt.
        ends = [update for update in (segment.first, segment.last) if update in ledger]
        processes = max([1, *(ledger[update].processes for update in ends)])
        components = select_components(setup, processes)
        is_comparable = components == COMPONENTS
        differing: dict[str, list[str]] = {}
        looks: dict[StepPosition, Any] = {}
        if is_comparable:
            for end in [checkpoint for checkpoint in loaded if checkpoint is not begin]:
                state = end.manifest.state
                # Several checkpoints at one place have the same content.
                looks[int(state["phase"]), int(state["step"])] = partial(
                    _compare_state,
                    end,
                    differing,
                    only_learned=processes > 1,
                    is_old=not ledger.header.is_chained,
                )
        # A run that has ended does not reach the update after its last one.
        is_end = self.is_finished and segment.last == self.evidence.last
        kept = _KeepPlan(start.plan)
        trained = replay_updates(
            setup,
            data,
            start,
            segment.last + is_end,
            content=_find_content(ledger, segment),
            hooks={"kept_plan": kept},
            state_at=looks,
        )
        findings = [
            *_compare_plans(segment, (start.plan, kept.plan), loaded),
            *_compare_start(segment, ledger, trained),
            *_compare_records(segment, ledger, trained, components),
            *_compare_end(segment, trained, is_end=is_end),
            *_compare_weights(segment, differing),
        ]
        here = Platform(
            describe_environment(setup, start.machine),
            self._packages,
            describe_platform(start.machine.device.type),
        )
        excuses = [
            line
            for promised in recorded
            for line in Platform.of_promise(promised).list_differences(here)
        ]
        if not is_comparable:
            excuses.append(
                f"the run had world size {processes} without ordered reduction, and one process "
                f"trains it again: only {' and '.join(components)} can be compared"
            )
        return Retrained(
            segment,
            components,
            len(
                [
                    update
                    for update in trained
                    if update in segment.list_updates() and update in ledger
                ]
            ),
            tuple(differing),
            tuple(end.name for end in segment.ends if is_comparable and end.name not in differing),
            tuple(findings),
            tuple(dict.fromkeys(excuses)),
        )

    def compare_config(self) -> str:
        """Return how config.yaml differs from the config of the newest checkpoint; empty if it does
        not.

        Raises:
            ChangedError: they differ although no attempt can have changed the config after the
                checkpoint, which is at the end of a finished run (code `verify.config_changed`).
        """
        if not self.evidence.saved:
            return ""  # the config that is trained again is that of config.yaml
        folder = self.evidence.folder
        promised = read_promised(folder, self.evidence.saved[-1].name, self.evidence.storage)
        changed = [
            change
            for change in list_config_changes(self._resolve(self._read_command()), promised)
            if change.resume != "free"
        ]
        if not changed:
            return ""
        listed = ", ".join(
            f"{change.path} = {format_value(change.new)} (the checkpoint has "
            f"{format_value(change.old)})"
            for change in changed
        )
        if self.is_finished and count_updates(self.evidence.saved[-1]) == self.evidence.last:
            raise ChangedError(
                f"{folder}/config.yaml is not the config of this run: {listed}; restore the file",
                code="verify.config_changed",
            )
        return f"config.yaml is not the config of the newest checkpoint: {listed}"

    def compare_status(self, status: StatusRecord) -> Iterator[Finding]:
        """Yield the wrong values about the end of a finished run in status.json."""
        if not self.is_finished:
            return
        last = self.evidence.last
        pairs: list[tuple[str, Any, Any]] = [
            ("updates", status.updates, last),
            ("ledger", status.content.get("ledger"), self.evidence.root),
        ]
        loaded = self._load_end()
        if loaded is not None and "model" in loaded.state["task"]:
            digest = hash_state(loaded.state["task"]["model"])
            pairs.append(("digest", status.digest, digest))
        for name, recorded, computed in pairs:
            if recorded and computed and recorded != computed:  # earlier releases lack some
                text = f"status.json has {name} {recorded}, the run has {computed} at its end"
                yield Finding("status", last, (name,), text)

    def _load_end(self) -> LoadedCheckpoint | None:
        """Return the checkpoint of the weights whose digest status.json has; None if there is none
        that has all of them."""
        if not self.evidence.saved or count_updates(self.evidence.saved[-1]) < self.evidence.last:
            return None
        reader = CheckpointReader(f"{self.evidence.folder}/{FOLDER}", self.evidence.storage)
        loaded = self._load(reader, self.evidence.saved[-1])
        if loaded is None or excluded_digests(loaded):
            return None
        # The digest is of the best checkpoint then.
        if loaded.promised["config"].get("CHECKPOINT", {}).get("load_best"):
            return None
        return loaded

    def _load(self, reader: CheckpointReader, saved: Saved | None) -> LoadedCheckpoint | None:
        if saved is None:
            return None
        return reader.load(self.evidence.path_of(saved))

    def _read_environment(self) -> dict[str, Any]:
        """Return environment.json in the form of a checkpoint's promise."""
        content = dict(self._read_command().environment.content)
        return {"environment": content, "packages": content.get("packages", {})}

    def _read_command(self) -> StoredConfig:
        return read_newest_command(self.evidence.folder)

    def _open(self, loaded: list[LoadedCheckpoint]) -> tuple[Setup, Mapping[str, SplitData]]:
        """Return the config of a segment and its data."""
        # Not by the whole composed config: parsing config.yaml takes longer than a short segment.
        key = ""
        if loaded:
            key = json.dumps(loaded[0].promised["config"], sort_keys=True)
        if key not in self._opened:
            if loaded:
                stored = read_loaded_config(loaded[0], loaded[0].path)
            else:
                stored = self._read_command()
            setup = self._resolve(stored)
            with trust_only(setup.trusted_paths):
                self._opened[key] = setup, setup.builder().data()
        return self._opened[key]

    def _resolve(self, stored: StoredConfig) -> Setup:
        return resolve_config(
            [
                f"RUN.dir={quote_value(self.evidence.folder)}",
                "LAUNCH.cluster=null",
                "LAUNCH.processes=1",
            ],
            stored=replace(stored, is_trusted=self.trust),
            terminal=Terminal(io.StringIO(), live=False),
        )


@dataclass(frozen=True)
class Platform:
    """Versions and hardware, on which bits depend besides config, data and code.

    Attributes:
        environment: versions, device and threads, see `describe_environment`.
        packages: package -> version.
        processors: see `describe_platform`.
    """

    environment: Mapping[str, Any]
    packages: Mapping[str, Any]
    processors: Mapping[str, Any]

    @classmethod
    def of_promise(cls, promised: Mapping[str, Any]) -> "Platform":
        """Return the platform that a checkpoint has recorded; old ones lack some facts."""
        recorded = [promised.get(name, {}) for name in ("environment", "packages", "platform")]
        return cls(*recorded)

    def list_differences(self, now: "Platform") -> list[str]:
        """Return how another platform differs from this one, or may differ."""
        pairs = [
            (
                {name: self.environment[name] for name in COMPARED if name in self.environment},
                now.environment,
            ),
            (
                {name: version for name, version in self.packages.items() if name not in COMPARED},
                now.packages,
            ),
            (self.processors, now.processors),
        ]
        lines = [
            f"{name} was {value}, here it is {here.get(name)}"
            for before, here in pairs
            for name, value in before.items()
            if value != here.get(name)
        ]
        if not self.processors:  # by a version that did not
            lines.append("the cpu was not recorded")
        return lines


def _match_threads(setup: Setup, promised: Mapping[str, Any]) -> Machine:
    threads = promised.get("environment", {}).get("threads")
    # Threads divide a sum, so their number decides about its last bits.
    if setup.machine.threads is None and isinstance(threads, int):
        return replace(setup.machine, threads=threads)
    return setup.machine


def _check_unchanged(setup: Setup, loaded: LoadedCheckpoint, data: Mapping[str, SplitData]) -> None:
    """Reject data or code that the run did not have: its results would prove nothing.

    Raises:
        ChangedError: with code `resume.data_changed` or `verify.code_changed`.
    """
    check_data_changes(setup, loaded, data)
    changed = list_source_changes(setup, loaded.promised)
    if changed:
        raise ChangedError(
            f"{loaded.path}: {' and '.join(changed)} since it was saved, so training it again "
            "would prove nothing; restore the code of the run (environment.json names the commit)",
            code="verify.code_changed",
        )


def _check_begin(segment: Segment, setup: Setup, begin: LoadedCheckpoint) -> Iterator[Finding]:
    """Yield why a segment cannot begin at a checkpoint, although no change is recorded."""
    update = segment.first - 1
    changed = [
        change.path
        for change in list_config_changes(setup, begin.promised)
        if change.resume != "free"
    ]
    if changed:
        text = (
            f"the config changed after update {update}, which no resume has recorded: "
            f"{join_first(changed, MAX_LISTED)}"
        )
        yield Finding("checkpoint", update, ("config",), text)
    phases = decode_plan(begin.promised["plan"]).phases
    phase, step = (int(begin.manifest.state[name]) for name in ("phase", "step"))
    limit = phases[phase].steps if phase < len(phases) else 0
    if phase > len(phases) or step > limit:
        text = (
            f"a checkpoint of update {update} is at step {step} of phase {phase}, which the plan "
            "of the run does not have"
        )
        yield Finding("checkpoint", update, ("position",), text)


class _KeepPlan(Hook):
    """Keeps the plan at the end of a replay, which has the last tests of a run that ends early.

    Args:
        plan: the plan at the start.
    """

    observe_only = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def on_end(self, run: Run) -> None:
        """Keep the plan."""
        self.plan = run.plan


def _compare_plans(
    segment: Segment, plans: Sequence[Plan], loaded: Sequence[LoadedCheckpoint]
) -> Iterator[Finding]:
    # The plan of a later checkpoint decides about the segments after it.
    if any(decode_plan(checkpoint.promised["plan"]) not in plans for checkpoint in loaded):
        text = (
            f"the plan changed between updates {segment.first - 1} and {segment.last}, which no "
            "resume has recorded"
        )
        yield Finding("checkpoint", segment.last, ("plan",), text)


def _find_content(ledger: Ledger, segment: Segment) -> Content:
    """Return how much of each batch was hashed in a segment."""
    # The last update speaks for all: a setting changes at a resume, and so at a checkpoint.
    if segment.last not in ledger:
        return "sampled"
    return find_content(ledger[segment.last])


def _compare_start(segment: Segment, ledger: Ledger, trained: Ledger) -> Iterator[Finding]:
    # A ledger that lost its beginning does not know the initial weights.
    before = ledger.header.start
    if segment.begin is not None or UNKNOWN_START in (before, trained.header.start):
        return
    if before != trained.header.start:
        text = (
            f"the initial weights differ: sha256 {before.hex()} in the ledger, "
            f"{trained.header.start.hex()} now"
        )
        yield Finding("weights", 0, ("initial weights",), text)


def _compare_records(
    segment: Segment, ledger: Ledger, trained: Ledger, components: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield the first update that differs."""
    # An attempt without the hook has left a gap in the ledger of the run; the weights at the end
    # are compared anyway.
    first = find_first_update(trained, ledger, components)
    missing = next((update for update in segment.list_updates() if update not in trained), None)
    # The training may have gone beyond the segment.
    end = segment.last + 1 if missing is None else missing
    if first is not None and first[0] < end:
        update, names = first
        pairs = "; ".join(
            f"{name} {ledger[update].format_component(name)} -> "
            f"{trained[update].format_component(name)}"
            for name in names
        )
        text = f"update {update} is the first that differs (ledger -> trained again): {pairs}"
        yield Finding("update", update, names, text)
    elif missing is not None:
        text = f"trained again, the run ends after update {trained.last or segment.first - 1}"
        yield Finding("update", missing, ("length",), text)


def _compare_end(segment: Segment, trained: Ledger, *, is_end: bool) -> Iterator[Finding]:
    if is_end and trained.last > segment.last:
        text = (
            f"the run says that it ended after update {segment.last}; trained again, it continues"
        )
        yield Finding("update", segment.last, ("length",), text)


def _compare_weights(segment: Segment, differing: Mapping[str, list[str]]) -> Iterator[Finding]:
    for name, tensors in differing.items():
        if tensors:
            text = (
                f"checkpoint {name} does not have the state of update {segment.last}: "
                f"{join_first(tensors, MAX_LISTED)}"
            )
            yield Finding("weights", segment.last, tuple(tensors), text)


def _compare_state(
    end: LoadedCheckpoint,
    differing: dict[str, list[str]],
    state: Mapping[str, Any],
    *,
    only_learned: bool,
    is_old: bool,
) -> None:
    """Add the names of the tensors of a checkpoint that are not in a state, bit for bit.

    Args:
        end: the checkpoint.
        differing: gets the names, by name of the checkpoint.
        state: the state of the run trained again.
        only_learned: leave out sums of metrics, which differ between ranks.
        is_old: compare only the entries of the checkpoint: checkpoints of 0.1 lack some.
    """
    names = [
        f"number of {name}"
        for name in ("updates", "samples")
        if not is_old and end.manifest.state[name] != state["position"][name]
    ]
    # Hooks that only observe are not called again, so they have no state to compare.
    labels = state["hooks"].keys() & end.state["hooks"].keys()
    if is_old:
        state = _drop_new_keys(state, end.state)
    before_tree, before = _flatten(end.state, labels, only_learned=only_learned)
    now_tree, now = _flatten(state, labels, only_learned=only_learned)
    names += [name for name in {**before, **now} if not is_equal(before.get(name), now.get(name))]
    # The text repeats the names of the tensors, which are reported already if they differ.
    if not names and before_tree != now_tree:
        names = ["state without tensors (optimizer, schedules or hooks)"]
    differing[end.path.rpartition("/")[2]] = names


def _drop_new_keys(state: Any, old: Any) -> Any:
    """Return a state without the keys that another one does not have, at any depth."""
    if not isinstance(state, Mapping) or not isinstance(old, Mapping):
        return state
    return {key: _drop_new_keys(state[key], old[key]) for key in state if key in old}


def _flatten(
    state: Mapping[str, Any], labels: Collection[str], *, only_learned: bool
) -> tuple[bytes, dict[str, Tensor]]:
    """Return the state of the task, and of the hooks with these labels, as text and tensors."""
    task = {
        name: part
        for name, part in state["task"].items()
        if not only_learned or not (name in OF_RANKS or name.startswith("meter."))
    }
    hooks = {label: state["hooks"][label] for label in sorted(labels)}
    tree, tensors = flatten_state({"task": task, "hooks": hooks})
    return tree, dict(tensors)
