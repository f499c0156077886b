"""Run a past update again from the nearest checkpoint, and compare it with the ledger
(RUN.engine=replay)."""

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.commands.build_hooks import build_checkpointer, build_hooks
from phasetrain.commands.replay.nonfinite_dump import examine_dump, read_step_dump
from phasetrain.commands.result import RunResult
from phasetrain.commands.setup import Setup, without_derived
from phasetrain.commands.train.resume import is_allowed, match_machine, restore_position
from phasetrain.config.changes import Change, differences
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import RunState
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook, Hooks, LedgerHook, Run
from phasetrain.hooks.ledger import Content
from phasetrain.hooks.numerics import ROOT, folder_name
from phasetrain.hooks.run_state import restore
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import (
    COMPONENTS,
    FILE,
    FULL,
    SAMPLED,
    InvalidLedgerError,
    Ledger,
    LedgerRecord,
    list_differences,
    parse_ledger,
)
from phasetrain.runs.records import RunFiles
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.storage import Storage

log = logging.getLogger(__name__)

SHARED = ("samples", "lr")
"""Components that a replay on one process shares with an update of several ranks."""


def replay(setup: Setup, hooks: Mapping[str, Hook] | None = None) -> RunResult:
    """Run update RUN.step again and print its values next to the record in the ledger.

    Takes no lock and writes nothing into the run folder, so that it may read a run that is
    training. Runs every update since the nearest checkpoint before it, and compares each. An update
    that was skipped because it was not finite is run from the dump of the hook `numerics`.

    Args:
        setup: the resolved config.
        hooks: label -> hook, in addition to the hooks in section HOOKS, if the run had any.

    Raises:
        ConfigError: there is no such update.
        ChangedError: config or data differ from the run.
    """
    began = time.perf_counter()
    folder = RunFolder(setup.config.RUN.dir)
    number = _update_number(setup)
    if not folder.holds_run():
        raise ConfigError(
            f"RUN.dir = {folder.path!r}: holds no run to replay; set RUN.dir to the folder of a "
            "run",
            code="run.not_found",
        )
    ledger = read_ledger(folder.storage, folder.path)
    dump = f"{folder.file(ROOT)}/{folder_name(number)}"
    kept = None
    code = 0
    if folder.storage.exists(dump):
        kept = read_step_dump(folder.storage, dump)
        code = examine_dump(setup, kept, dump, match_run_config(setup, folder))
    if kept is not None and len(kept.shares) > 1:
        log.info(
            "not compared with the ledger: it is of world size %d, this is one process",
            len(kept.shares),
        )
    elif kept is None or (ledger is not None and number in ledger):
        code = max(code, _Replay(setup, folder, number, ledger).run(hooks or {}))
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
    path = f"{folder}/{FILE}"
    if not storage.exists(path):
        return None
    try:
        ledger = parse_ledger(storage.read(path), path)
    except InvalidLedgerError as error:
        raise ConfigError(f"RUN.dir = {folder!r}: {error}") from error
    if ledger.damaged:
        log.warning("%s: %d damaged records were skipped", path, len(ledger.damaged))
    return ledger


def match_run_config(setup: Setup, folder: RunFolder) -> Machine:
    """Compare the config with config.yaml, as there is no checkpoint, and return the machine of the
    run.

    Raises:
        ChangedError: a key that affects the trajectory differs, without RUN.allow.
    """
    text = folder.storage.read(folder.file("config.yaml")).decode()
    before: Any = OmegaConf.to_container(OmegaConf.create(text))
    allowed = setup.config.RUN.allow
    found = differences(without_derived(before, setup.composed.config), setup.asked, setup.schema)
    if refused := [
        change for change in found if change.resume != "free" and not is_allowed(change, allowed)
    ]:
        raise ChangedError(
            f"{folder.path!r} holds a run with another config, so a replay would differ: "
            f"{'; '.join(map(_format_change, refused))}. Take the values of the run"
        )
    threads = RunFiles(folder.path, folder.storage).environment().threads
    if setup.machine.threads is None and threads is not None:
        return replace(setup.machine, threads=threads)
    return setup.machine


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
        loaded = self._load_before()
        if loaded is None:
            since = "its start"
            machine = match_run_config(self.setup, self.folder)
            plan = self.builder.plan(data)
            state = RunState()
        else:
            since = loaded.path
            plan, state, _ = restore_position(self.setup, loaded, data, self.builder.stages(data))
            machine, warnings = match_machine(self.setup, loaded)
            for line in warnings:
                log.warning(line)
        if self.number > plan.updates:
            raise ConfigError(
                f"RUN.step = {self.number}: the plan of this run has {plan.updates} updates"
            )
        task = self.builder.task(self.builder.parts(data, plan, fresh=loaded is None))
        log.info(
            "replaying update %d of %s from %s (update %d)",
            self.number,
            self.folder.path,
            since,
            state.updates,
        )
        # Hooks write to a scratch folder: the run may be training, and its files are its own.
        with _scratch_folder() as scratch, machine.apply_settings():
            own = {
                "replay": _UpTo(self.number, loaded),
                "replayed": LedgerHook(self._hashed_content()),
            }
            hooks = {**own, **_drop_observers(build_hooks(self.setup)), **extra}
            engine = PhaseEngine(
                task,
                plan,
                state,
                Hooks(hooks, self.setup.world),
                folder=scratch,
                world=self.setup.world,
            )
            with closing(engine):
                engine.run()
            found = read_ledger(scratch.storage, scratch.path)
        assert found is not None, "the ledger hook has written its header"
        return self._compare_updates(found)

    def _hashed_content(self) -> Content:
        """Return how much of the batch content to hash, as in the ledger's record of this
        update."""
        if self.ledger is None:
            return "sampled"
        flags = self.ledger[self.number].flags
        if flags & FULL:
            return "full"
        if flags & SAMPLED:
            return "sampled"
        return "none"

    def _load_before(self) -> LoadedCheckpoint | None:
        """Return the newest valid checkpoint before the update, or None."""
        checkpointer = build_checkpointer(self.setup, self.folder)
        saved = [
            one
            for one in checkpointer.list_checkpoints()
            if one.manifest.state["updates"] < self.number
        ]
        # The newest first, because every update after the checkpoint has to be repeated.
        for one in reversed(saved):
            try:
                return checkpointer.load(f"{checkpointer.root}/{one.name}")
            except ConfigError as error:
                log.warning("%s/%s was skipped: %s", checkpointer.root, one.name, error)
        return None

    def _compare_updates(self, found: Ledger) -> int:
        """Print the table of the update and the first update that differs; return the exit code."""
        if self.number not in found:
            raise ConfigError(
                f"RUN.step = {self.number}: the run ends before it, after update {found.last}"
            )
        told = self._select_components()
        self._print_record(found[self.number], told)
        if self.ledger is None:
            log.warning(
                "%s has no %s (HOOKS.ledger): nothing to check against", self.folder.path, FILE
            )
            return 0
        # All updates since the checkpoint, not only the one asked for: the first difference is the
        # cause, and those after it are only its consequences.
        checked = [updates for updates in found if updates in self.ledger]
        for updates in checked:
            parts = list_differences(self.ledger[updates], found[updates])
            if parts := [part for part in parts if part in told]:
                log.error("update %d is the first that differs: %s", updates, ", ".join(parts))
                return 1
        if len(checked) > 1:
            first = f"updates {checked[0]} to {checked[-1]} equal"
        else:
            first = f"update {checked[0]} equals"
        log.info("%s the ledger, bit for bit", first)
        return 0

    def _select_components(self) -> tuple[str, ...]:
        """Return the components to compare: not all of them if the world size differs."""
        if self.ledger is None:
            return COMPONENTS
        made_by = self.ledger[self.number].processes
        if made_by == 1 or self.setup.config.DISTRIBUTED.reduction == "ordered":
            return COMPONENTS
        log.warning(
            "the update is of world size %d, the replay of 1: sums have other last bits, so only "
            "%s are compared",
            made_by,
            " and ".join(SHARED),
        )
        return SHARED

    def _print_record(self, now: LedgerRecord, told: tuple[str, ...]) -> None:
        then = None if self.ledger is None else self.ledger[self.number]
        rows = [(name, *_format_cells(then, now, name)) for name in told]
        self.setup.terminal.print_table(f"update {self.number}", ("", "ledger", "replay", ""), rows)


class _UpTo(Hook):
    """Restores a checkpoint, and stops after an update."""

    def __init__(self, number: int, loaded: LoadedCheckpoint | None) -> None:
        self._number = number
        self._loaded = loaded

    def on_start(self, run: Run) -> None:
        """Restore the checkpoint."""
        if self._loaded is not None:
            restore(run, self._loaded)
            # dropped at once: the tensors of the checkpoint would stay in memory until the end
            run.resumed_from, self._loaded = self._loaded.path, None

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Stop after the update."""
        if run.state.updates >= self._number:
            run.stop("replayed", interrupted=True)


def _update_number(setup: Setup) -> int:
    number: int | None = setup.config.RUN.step
    if number is None:
        raise ConfigError(
            "RUN.step = null: RUN.engine = 'replay' needs the number of an update, from 1",
            code="config.missing_value",
        )
    return number


def _drop_observers(hooks: Mapping[str, Hook]) -> dict[str, Hook]:
    # Hooks that only observe have reported these updates when the run made them: a tracker would
    # get every value twice. The other hooks take part in the trajectory and have to run again.
    return {label: hook for label, hook in hooks.items() if not hook.observe_only}


@contextmanager
def _scratch_folder() -> Iterator[RunFolder]:
    """Give hooks a temporary folder to write to."""
    with tempfile.TemporaryDirectory(prefix="phasetrain-replay-") as path:
        folder = RunFolder(str(Path(path)))
        try:
            yield folder
        finally:
            folder.close()


def _describe_ledger(ledger: Ledger) -> str:
    if not ledger:
        return "holds no update yet"
    return f"holds {len(ledger)} updates, from {min(ledger)} to {ledger.last}, and not this one"


def _format_cells(
    then: LedgerRecord | None, now: LedgerRecord, component: str
) -> tuple[str, str, str]:
    new = now.format_component(component) or "-"
    if then is None:
        return "-", new, ""
    verdict = "equal"
    if component in list_differences(then, now):
        verdict = "DIFFERENT"
    return then.format_component(component) or "-", new, verdict


def _format_change(change: Change) -> str:
    return f"{change.path} was {change.old!r} and is {change.new!r}"
