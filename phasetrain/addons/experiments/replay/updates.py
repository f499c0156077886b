"""Run a range of past updates again, from a checkpoint or from the start of the run.

The result is a ledger, to compare with the ledger of the run. Used by `phasetrain replay` and
`phasetrain verify`.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from phasetrain.app.build_hooks import build_hooks
from phasetrain.app.setup import Setup
from phasetrain.app.train.resume import match_machine, restore_position
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hook, Hooks, LedgerHook, Run
from phasetrain.hooks.ledger import Content
from phasetrain.hooks.run_state import collect_state, restore
from phasetrain.proof.positions import StepPosition
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import (
    COMPONENTS,
    FILE,
    FULL,
    SAMPLED,
    Ledger,
    LedgerRecord,
    encode_ledger,
    parse_ledger,
)
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import SplitData

SHARED = ("samples", "lr")
"""Components that one process has in common with several ranks that do not reduce in order."""

StateAt = Mapping[StepPosition, Callable[[dict[str, Any]], None]]
"""Position -> what gets the state of the run there, as a checkpoint would hold it: `task`, and
`hooks` with the hooks that affect the training, and `position` with the counts of the position."""


@dataclass(frozen=True)
class ReplayStart:
    """Where a replay begins.

    Attributes:
        plan: the plan of the run.
        state: position before the first update.
        machine: device and numerics of the run.
        loaded: the checkpoint; None for the initial weights.
        warnings: how the machine differs from the one of the checkpoint.
    """

    plan: Plan
    state: RunState
    machine: Machine
    loaded: LoadedCheckpoint | None = None
    warnings: tuple[str, ...] = ()


def start_at(setup: Setup, data: Mapping[str, SplitData], loaded: LoadedCheckpoint) -> ReplayStart:
    """Return the start of a replay from a checkpoint.

    Raises:
        ChangedError: config or data differ from the checkpoint.
    """
    plan, state, _ = restore_position(setup, loaded, data, setup.builder().stages(data))
    machine, warnings = match_machine(setup, loaded)
    return ReplayStart(plan, state, machine, loaded, tuple(warnings))


def replay_updates(
    setup: Setup,
    data: Mapping[str, SplitData],
    start: ReplayStart,
    last: int,
    *,
    content: Content = "sampled",
    hooks: Mapping[str, Hook] = MappingProxyType({}),
    state_at: StateAt = MappingProxyType({}),
) -> Ledger:
    """Run the updates after a start again, in this process, and return their records.

    See `open_replay`, which has the arguments that are not described here.

    Args:
        setup, data, start, hooks: see `open_replay`.
        last: the last update to run; the run may end before it.
        content: how much of each batch is hashed, see `find_content`.
        state_at: places after the last update, to which the replay then continues.
    """
    up_to = _UpTo(last, start.loaded, state_at)
    own = {"replay": up_to, "replayed": LedgerHook(content)}
    with open_replay(setup, data, start, own, hooks) as engine:
        engine.run()
        return read_records(engine)


@contextmanager
def open_replay(
    setup: Setup,
    data: Mapping[str, SplitData],
    start: ReplayStart,
    own: Mapping[str, Hook],
    hooks: Mapping[str, Hook] = MappingProxyType({}),
) -> Iterator[PhaseEngine]:
    """Build a run in this process that continues from a start.

    Nothing is written outside of a temporary folder. Random generators of this process are reseeded
    as in the run. Hooks of the config that only observe are left out.

    Args:
        setup: the resolved config of the run.
        data: its data.
        start: where to begin; the first hook restores the state.
        own: label -> hook, called before the hooks of the config at opening events.
        hooks: label -> hook, in addition to the hooks of the config.
    """
    builder = setup.builder()
    fresh = start.loaded is None or bool(excluded_digests(start.loaded))
    task = builder.task(builder.parts(data, start.plan, fresh=fresh))
    for loader in task.parts.loaders.values():
        # Workers would write their stacks into the run folder.
        loader.settings = replace(loader.settings, stacks=None)
    # Hooks that only observe have reported these updates when the run made them: a tracker
    # would get every value twice. The other hooks affect the trajectory and have to run again.
    configured = {
        label: hook for label, hook in build_hooks(setup).items() if not hook.observe_only
    }
    with (
        tempfile.TemporaryDirectory(prefix="phasetrain-replay-") as path,
        closing(RunFolder(path)) as scratch,
        start.machine.apply_settings(),
    ):
        engine = PhaseEngine(
            task,
            start.plan,
            start.state,
            Hooks({**own, **configured, **hooks}, setup.world),
            folder=scratch,
            world=setup.world,
        )
        engine.stages = builder.stages(data)
        with closing(engine):
            yield engine


def read_records(engine: PhaseEngine) -> Ledger:
    """Return the records that the hook `ledger` of a replay has written."""
    assert engine.folder is not None, "a replay has a temporary folder"
    written = engine.folder.storage.read(engine.folder.file(FILE))
    # The hook writes the header with the first update, and the run may end before it.
    return parse_ledger(written or encode_ledger([]))


def select_components(setup: Setup, processes: int) -> tuple[str, ...]:
    """Return the components of a record that one process computes as a run did.

    Args:
        setup: the resolved config of the run.
        processes: its world size.
    """
    # Sums of several ranks without a fixed order have other last bits in one process.
    if processes == 1 or setup.config.DISTRIBUTED.reduction == "ordered":
        return COMPONENTS
    return SHARED


def find_content(record: LedgerRecord) -> Content:
    """Return how much of the batch content a record has hashed."""
    if record.flags & FULL:
        return "full"
    if record.flags & SAMPLED:
        return "sampled"
    return "none"


class _UpTo(Hook):
    """Restores a checkpoint, and stops after an update, or at the last place to look at."""

    main_only = False

    def __init__(self, last: int, loaded: LoadedCheckpoint | None, state_at: StateAt) -> None:
        self._last = last
        self._loaded = loaded
        self._state_at = dict(state_at)

    def on_start(self, run: Run) -> None:
        """Restore the checkpoint."""
        if self._loaded is not None:
            restore(run, self._loaded)
            # dropped at once: the tensors of the checkpoint would stay in memory until the end
            run.resumed_from, self._loaded = self._loaded.path, None

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Stop if this was the last step to run."""
        self._look(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Stop if this was the last phase to run."""
        self._look(run)

    def on_end(self, run: Run) -> None:
        """Look at the last place of the run."""
        self._look(run)

    # The first hook of a run gets closing events last, as the checkpoint hook does: it sees the
    # state that a checkpoint at this place has.
    def _look(self, run: Run) -> None:
        look = self._state_at.pop((run.state.phase, run.state.step), None)
        if look is not None:
            trained_by = [
                label
                for label, hook in run.hooks.by_label.items()
                if not hook.observe_only and hook is not self
            ]
            state = collect_state(run)
            look(
                {
                    **state,
                    "position": run.state.state_dict(),
                    "hooks": {
                        label: state["hooks"][label]
                        for label in trained_by
                        if label in state["hooks"]
                    },
                }
            )
        if run.state.updates < self._last:
            return
        # a place that the replay misses must not let it run to the end
        if not self._state_at or run.state.updates > self._last:
            run.stop("replayed", interrupted=True)
