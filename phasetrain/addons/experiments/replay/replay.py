"""Run a past update again from the nearest checkpoint, and compare it with the ledger
(RUN.engine=replay)."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from phasetrain.addons.experiments.replay.nonfinite_dump import examine_dump, read_step_dump
from phasetrain.addons.experiments.replay.updates import (
    ReplayStart,
    find_content,
    replay_updates,
    select_components,
    start_at,
)
from phasetrain.addons.experiments.run_keys import RunKeys
from phasetrain.app.build_hooks import build_checkpointer
from phasetrain.app.engines import Extras
from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup, without_derived
from phasetrain.app.train.resume import is_allowed, limit_to_checkpoint
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.config.changes import compare_configs
from phasetrain.engine.position import RunState
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook
from phasetrain.hooks.ledger import Content
from phasetrain.hooks.numerics import ROOT, folder_name
from phasetrain.hooks.observers import classify_hooks
from phasetrain.proof.compare import find_first_update
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import (
    COMPONENTS,
    FILE,
    InvalidLedgerError,
    Ledger,
    LedgerRecord,
    list_differences,
)
from phasetrain.runs.view import CONFIG, RunView
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import SplitData

log = logging.getLogger(__name__)


def replay(setup: Setup, extras: Extras | None = None) -> RunResult:
    """Run update RUN.step again and print its values next to the record in the ledger.

    Takes no lock and writes nothing into the run folder, so that it may read a run that is
    training. Runs every update since the nearest checkpoint before it, and compares each. An update
    that was skipped because it was not finite is run from the dump of the hook `numerics`.

    Args:
        setup: the resolved config.
        extras: has the hooks in addition to those in section HOOKS, if the run had any.

    Raises:
        ConfigError: there is no such update.
        ChangedError: config or data differ from the run.
    """
    began = time.perf_counter()
    folder = RunFolder(setup.config.RUN.dir)
    keys: RunKeys = setup.config["RUN"]
    number = keys.step
    if number is None:
        raise ConfigError(
            "RUN.step = null: RUN.engine = 'replay' needs the number of an update, from 1",
            code="config.missing_value",
        )
    if not folder.has_run():
        raise ConfigError(
            f"RUN.dir = {folder.path!r}: contains no run to replay; set RUN.dir to the folder of a "
            "run",
            code="run.not_found",
        )
    if setup.machine.cpu_capability is None:
        limit_to_checkpoint(folder.storage, folder.path)
    ledger = read_ledger(folder.storage, folder.path)
    dump = f"{folder.file(ROOT)}/{folder_name(number)}"
    kept = None
    code = 0
    if folder.storage.exists(dump):
        kept = read_step_dump(folder.storage, dump)
        code = examine_dump(setup, kept, dump, match_run_config(setup, folder))
    if kept is not None and len(kept.shares) > 1:
        log.info(
            "not compared with the ledger: the run had world size %d, the replay has one process",
            len(kept.shares),
        )
    elif kept is None or (ledger is not None and number in ledger):
        code = max(code, _Replay(setup, folder, number, ledger).run(extras.hooks if extras else {}))
    return RunResult(
        "replayed",
        exit_code=code,
        folder=folder.path,
        updates=number,
        seconds=time.perf_counter() - began,
    )


def read_ledger(storage: Storage, folder: str) -> Ledger | None:
    """Return the ledger of a run folder, or None if it has none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        ledger = RunView(folder, storage).ledger
    except InvalidLedgerError as error:
        raise ConfigError(f"RUN.dir = {folder!r}: {error}") from error
    if ledger is not None and ledger.damaged:
        log.warning("%s/%s: %d damaged records were skipped", folder, FILE, len(ledger.damaged))
    return ledger


def match_run_config(setup: Setup, folder: RunFolder) -> Machine:
    """Compare the config with config.yaml, as there is no checkpoint, and return the machine of the
    run.

    Raises:
        ChangedError: a key that affects the trajectory differs, without RUN.allow.
        ConfigError: there is no readable config.yaml.
    """
    run = RunView(folder.path, folder.storage)
    if not run.config:
        reason = " ".join(run.problems) or f"There is no {CONFIG}."
        raise ConfigError(
            f"RUN.dir = {folder.path!r}: {reason} Restore it, or set RUN.dir to the folder of a "
            "run",
            code="run.not_found",
        )
    allowed = setup.config.RUN.allow
    before = without_derived(run.config, setup.composed.config)
    asked = setup.asked
    changes = compare_configs(before, asked, classify_hooks(setup.schema, before, asked))
    rejected = [
        f"{change.path} was {change.old!r} and is {change.new!r}"
        for change in changes
        if change.resume != "free" and not is_allowed(change, allowed)
    ]
    if rejected:
        raise ChangedError(
            f"{folder.path!r} contains a run with another config, so a replay would differ: "
            f"{'; '.join(rejected)}. Set these keys to the values of the run"
        )
    threads = run.environment.threads
    if setup.machine.threads is None and threads is not None:
        return replace(setup.machine, threads=threads)
    return setup.machine


def find_start(
    setup: Setup, folder: RunFolder, data: Mapping[str, SplitData], number: int
) -> ReplayStart:
    """Return the newest valid checkpoint before an update, or the start of the run.

    Raises:
        ChangedError: config or data differ from the run.
        ConfigError: there is neither a checkpoint nor a readable config.yaml.
    """
    loaded = load_before(setup, folder, number)
    if loaded is not None:
        return start_at(setup, data, loaded)
    machine = match_run_config(setup, folder)
    return ReplayStart(setup.builder().plan(data), RunState(), machine)


def load_before(setup: Setup, folder: RunFolder, number: int) -> LoadedCheckpoint | None:
    """Return the newest valid checkpoint before an update, or None."""
    checkpointer = build_checkpointer(setup, folder)
    before = [
        saved
        for saved in checkpointer.list_checkpoints()
        if saved.manifest.state["updates"] < number
    ]
    # The newest first, because every update after the checkpoint has to be repeated.
    for saved in reversed(before):
        try:
            return checkpointer.load(f"{checkpointer.root}/{saved.name}")
        except ConfigError as error:
            log.warning("%s/%s was skipped: %s", checkpointer.root, saved.name, error)
    return None


class _Replay:
    """One replay.

    Args:
        setup: the resolved config.
        folder: the run folder; it is only read.
        number: number of the update.
        ledger: of the run, or None.
    """

    def __init__(self, setup: Setup, folder: RunFolder, number: int, ledger: Ledger | None) -> None:
        self.setup = setup
        self.folder = folder
        self.number = number
        self.ledger = ledger
        self.builder = setup.builder()

    def run(self, extra: Mapping[str, Hook]) -> int:
        """Run up to the update, print its table, and return the exit code."""
        if self.ledger is not None and self.number not in self.ledger:
            raise ConfigError(
                f"RUN.step = {self.number}: {self.ledger.path} {_describe_ledger(self.ledger)}"
            )
        data = self.builder.data()
        start = find_start(self.setup, self.folder, data, self.number)
        since = "its start" if start.loaded is None else start.loaded.path
        for line in start.warnings:
            log.warning(line)
        if self.number > start.plan.updates:
            raise ConfigError(
                f"RUN.step = {self.number}: the plan of this run has {start.plan.updates} updates"
            )
        log.info(
            "replaying update %d of %s from %s (update %d)",
            self.number,
            self.folder.path,
            since,
            start.state.updates,
        )
        content: Content = "sampled"
        if self.ledger is not None:
            content = find_content(self.ledger[self.number])
        replayed = replay_updates(
            self.setup, data, start, self.number, content=content, hooks=extra
        )
        return self._compare_updates(replayed)

    def _compare_updates(self, replayed: Ledger) -> int:
        """Print the table of the update and the first update that differs; return the exit code."""
        if self.number not in replayed:
            raise ConfigError(
                f"RUN.step = {self.number}: the run ends before it, after update {replayed.last}"
            )
        components = self._select_components()
        before = None if self.ledger is None else self.ledger[self.number]
        now = replayed[self.number]
        rows = [(name, *_format_cells(before, now, name)) for name in components]
        self.setup.terminal.print_table(f"update {self.number}", ("", "ledger", "replay", ""), rows)
        if self.ledger is None:
            log.warning(
                "%s has no %s (HOOKS.ledger): nothing to check against", self.folder.path, FILE
            )
            return 0
        # All updates since the checkpoint, not only the one asked for: the first difference is the
        # cause, and those after it are only its consequences.
        first = find_first_update(replayed, self.ledger, components)
        if first is not None:
            update, differing = first
            log.error("update %d is the first that differs: %s", update, ", ".join(differing))
            return 1
        checked = [update for update in replayed if update in self.ledger]
        if len(checked) > 1:
            equal = f"updates {checked[0]} to {checked[-1]} equal"
        else:
            equal = f"update {checked[0]} equals"
        if components == COMPONENTS:
            log.info("%s the ledger, bit for bit", equal)
        else:
            log.info("%s the ledger in %s", equal, " and ".join(components))
        return 0

    def _select_components(self) -> tuple[str, ...]:
        """Return the components to compare: not all of them if the world size differs."""
        if self.ledger is None:
            return COMPONENTS
        made_by = self.ledger[self.number].processes
        components = select_components(self.setup, made_by)
        if components != COMPONENTS:
            log.warning(
                "the run had world size %d, the replay has one process: sums differ in their last "
                "bits, so only %s are compared",
                made_by,
                " and ".join(components),
            )
        return components


def _describe_ledger(ledger: Ledger) -> str:
    if not ledger:
        return "has no updates yet"
    return f"has {len(ledger)} updates, from {min(ledger)} to {ledger.last}, and not this one"


def _format_cells(
    before: LedgerRecord | None, now: LedgerRecord, component: str
) -> tuple[str, str, str]:
    new = now.format_component(component) or "-"
    if before is None:
        return "-", new, ""
    verdict = "DIFFERENT" if component in list_differences(before, now) else "equal"
    return before.format_component(component) or "-", new, verdict
