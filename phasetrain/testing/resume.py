"""Checks that a run with custom parts resumes bit-identically after a kill."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from phasetrain.app.shorten import shortening_overrides, steps_before
from phasetrain.engine.plan import Plan
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.hooks.hidden_state import NOT_EXACT
from phasetrain.hooks.trace import TraceHook
from phasetrain.proof.compare import find_difference
from phasetrain.proof.trace import Trace
from phasetrain.testing.kills import KillAfter, Killed, SaveEachStep, run_quietly


@dataclass(frozen=True, order=True)
class Kill:
    """The moment at which an attempt is killed.

    Attributes:
        steps: number of train and test steps that are completed and saved.
        phase_ends: whether the phase that ended with the last of them is saved as complete.
    """

    steps: int
    phase_ends: bool = False

    def __str__(self) -> str:
        return f"step {self.steps}" + (" and the end of its phase" if self.phase_ends else "")


@dataclass
class _Runs:
    """A run without kills, and the attempts of a run that is killed repeatedly."""

    overrides: list[str]
    config_dir: str | None
    workers: Sequence[int] | None
    unbroken: Trace = field(default_factory=Trace)

    def run_unbroken(self, folder: str) -> Plan:
        hook = TraceHook(self.unbroken)
        run_quietly(self._words(folder, 0, None), {"trace": hook}, config_dir=self.config_dir)
        assert hook.plan is not None, "the run did not begin"
        return hook.plan

    def run_attempt(self, folder: str, number: int, before: Kill, kill: Kill | None) -> Trace:
        """Start or resume the run until the kill or the end, and return its trace."""
        trace = Trace()
        hooks: dict[str, Hook] = {"trace": TraceHook(trace), "save_each_step": SaveEachStep()}
        if kill is not None:
            hooks["kill"] = KillAfter(kill.steps - before.steps)
        try:
            run_quietly(self._words(folder, number, kill), hooks, config_dir=self.config_dir)
        except Killed:
            return trace  # valid up to the kill: the trace is kept in memory, not in the run
        assert kill is None, f"the run ended before {kill}"
        return trace

    def _words(self, folder: str, number: int, kill: Kill | None) -> list[str]:
        words = [
            *self.overrides,
            f"RUN.dir={folder}",
            # What the rehearsal would find is found here at more places, and with its causes.
            "RUN.rehearse=false",
            # Saves at the end of a phase only where the kill is to come after such a save.
            f"CHECKPOINT.every_epochs={1 if kill and kill.phase_ends else 'null'}",
        ]
        if self.workers:
            words.append(f"DATA.TRAIN.workers={self.workers[number % len(self.workers)]}")
        return words


def assert_exact_resume(
    overrides: Sequence[str],
    *,
    steps: Sequence[int] | None = None,
    config_dir: str | None = None,
    workers: Sequence[int] | None = (0, 2),
) -> None:
    """Assert that a killed and resumed run is bit-identical to an uninterrupted one.

    A shortened run (two epochs of three updates, and two batches of each test) is run without
    kills, and again with kills: after the first and after the second step, at the end of the epoch
    before and after it is saved as complete, during the test, and in the next epoch. All batches,
    losses, metrics and states are compared.

    Args:
        overrides: describe the run; its length and its folder do not matter.
        steps: numbers of steps after which to kill it, instead of the default ones.
        config_dir: folder with custom configs.
        workers: numbers of loader workers, used by the attempts in turn; None: as configured.

    Raises:
        AssertionError: names the first difference, the step, the kill before it and a usual cause.

    Example:
        >>> assert_exact_resume(["experiment=digits", "LOSS.name=my_parts.focal"])
    """
    words = [*overrides, *shortening_overrides(overrides, config_dir)]
    try:
        _compare_attempts(_Runs(words, config_dir, workers), steps)
    except ConfigError as error:
        if error.code != NOT_EXACT:
            raise
        # The comparison names the step and the cause as well.
        _compare_attempts(_Runs([*words, "RUN.exact=false"], config_dir, workers), steps)
        raise AssertionError(str(error)) from error


def _compare_attempts(runs: _Runs, steps: Sequence[int] | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = runs.run_unbroken(f"{folder}/unbroken")
        kills = default_kills(plan) if steps is None else sorted(map(Kill, set(steps)))
        _check_range(kills, plan)
        before = Kill(0)
        # The last attempt, without a kill, runs to the end.
        for number, kill in zip(count(), [*kills, None], strict=False):
            trace = runs.run_attempt(f"{folder}/killed", number, before, kill)
            _compare(runs.unbroken, trace, before)
            before = kill or before


def default_kills(plan: Plan) -> list[Kill]:
    """Return the default kills."""
    total = steps_before(plan, len(plan.phases))
    kills = {Kill(1), Kill(2)}
    for phase in plan.phases:
        before = steps_before(plan, phase.index)
        if phase.is_train and phase.epoch == 0 and phase.ends_epoch:
            kills |= {Kill(before + phase.steps), Kill(before + phase.steps, phase_ends=True)}
        elif phase.epoch <= 1 or (phase.is_train and len(plan.stages) > 1):
            kills.add(Kill(before + 1))
    return sorted(kill for kill in kills if 0 < kill.steps < total)


def _check_range(kills: Sequence[Kill], plan: Plan) -> None:
    total = steps_before(plan, len(plan.phases))
    beyond = [kill.steps for kill in kills if not 0 < kill.steps < total]
    if beyond:
        raise ValueError(
            f"steps = {beyond}: the shortened run has {total} steps; give some from 1 to "
            f"{total - 1}"
        )


def _compare(unbroken: Trace, trace: Trace, kill: Kill) -> None:
    when = "before the first kill, so two runs from the start differ"
    if kill.steps:
        when = f"killed after {kill}"
        if trace.restored is None:
            raise AssertionError(f"{when}, the run started from the beginning instead of resuming")
    difference = find_difference(unbroken, trace)
    if difference is not None:
        raise AssertionError(difference.describe(when, unbroken.phases))
