"""Checks between steps and phases: state that no checkpoint contains, modes that the
next phase undoes, and monitored metrics that nothing measures."""

import logging
from collections.abc import Mapping

from phasetrain.addons.observe.state_watch import StateWatch, list_named_modules
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import Run
from phasetrain.hooks.metrics import LatestMetrics
from phasetrain.hooks.monitors.monitor import Monitor
from phasetrain.meters.loss import MeanOfLogged
from phasetrain.proof.held import is_custom
from phasetrain.runtime.format import join_first
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

MAX_NAMES = 4
"""Number of names in a warning."""


class RunWatch(StateWatch):
    """Finds state that no checkpoint contains, and warns once of modes that the next phase undoes
    and of monitored metrics that a phase has not measured; see `StateWatch`."""

    _modes: "ModeWatch | None" = None
    _unmeasured: frozenset[str] = frozenset()
    _looks = True

    @property
    def looks(self) -> bool:
        """Whether `end_step` looks at anything after the next step."""
        return self._looks or (self._modes is not None and self._modes.is_due())

    @looks.setter
    def looks(self, looks: bool) -> None:
        self._looks = looks

    def begin_phase(self, run: Run, phase: Phase) -> None:
        """Call it when all hooks have begun a phase."""
        if self.phase is None and has_custom_code(run):
            self._modes = ModeWatch(run)
        if phase is not self.phase and self._modes is not None:
            self._modes.begin_phase(phase)
        super().begin_phase(run, phase)

    def end_step(self) -> None:
        """Call it after each step."""
        if self._modes is not None and self._modes.is_due():
            self._modes.end_step()
        if self._looks:
            super().end_step()

    def check(self, run: Run) -> list[str]:
        """Do the same as `StateWatch.check`, and warn of monitors after the first phase that should
        have measured them."""
        phase = self.phase
        if phase is not None and not phase.is_train and run.state.phase > phase.index:
            self._check_monitors(run, phase)
        return super().check(run)

    def _check_monitors(self, run: Run, phase: Phase) -> None:
        hooks = run.hooks.by_label.values()
        measured = read_latest(run)
        monitors = {
            value.key: value
            for hook in hooks
            for value in getattr(hook, "__dict__", {}).values()
            if isinstance(value, Monitor) and value.key
        }
        for key, monitor in monitors.items():
            objective = monitor.objective
            is_missing = objective.split == phase.split and objective.metric not in measured
            if not is_missing or key in self._unmeasured:
                continue
            self._unmeasured |= {key}
            cause = "its meter has seen no samples"
            if isinstance(run.task.meters.get(monitor.label), MeanOfLogged):
                cause = (
                    "a meter of the kind logged only declares it: a hook has to add it to "
                    "`metrics` in on_metrics, or a model, a loss or the task to log it by "
                    "phasetrain.log in the test"
                )
            log.warning(
                "%s = %r: no test has measured %s up to update %d, so it selects nothing; %s",
                key,
                monitor.name,
                objective.metric,
                run.state.updates,
                cause,
            )


class ModeWatch:
    """Warns once if a train phase undoes the modes of modules that were set during the one before.

    Phases end with epochs and at tests, so how long such a mode lasts would depend on when the run
    tests. Modes that are set at the start of a phase are meant for that phase.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._phase: Phase | None = None
        self._first_step = 0
        self._begun: Mapping[str, bool] = {}
        # Modes that a complete phase had at its end, if they were set during it.
        self._set: Mapping[str, bool] = {}
        self._is_silent = False

    def begin_phase(self, phase: Phase) -> None:
        """Record the modes when all hooks have begun a phase."""
        self._phase = phase if phase.is_train and not self._is_silent else None
        if self._phase is not None:
            self._first_step = self._run.state.step + 1
            self._begun = read_modes(self._run.task)

    def is_due(self) -> bool:
        """Return whether `end_step` compares anything after the step that was just counted."""
        if self._phase is None:
            return False
        step = self._run.state.step
        return step in (self._first_step, self._phase.steps)

    def end_step(self) -> None:
        """Compare the modes after the first and the last step of a train phase."""
        assert self._phase is not None, "the step is due"
        modes = read_modes(self._run.task)
        step = self._run.state.step
        # After the step, in which hooks and tasks may set modes again.
        if step == self._first_step and self._set:
            self._warn([name for name, mode in self._set.items() if modes.get(name) is not mode])
            self._set = {}
        if step == self._phase.steps:
            begun = self._begun
            self._set = {n: mode for n, mode in modes.items() if begun.get(n, mode) is not mode}

    def _warn(self, undone: list[str]) -> None:
        if not undone:
            return
        self._is_silent = True
        is_training = self._set[undone[0]]
        log.warning(
            "the mode of %s, set by %s during a train phase, was undone before update %d: each "
            "phase calls train() or eval(), and phases end with epochs and at tests, so the "
            "weights depend on when the run tests. Set the mode in on_phase_start of a hook, which "
            "comes in each phase, or freeze modules by MODEL.freeze; after an evaluation of your "
            "own, set it back",
            join_first(undone, MAX_NAMES),
            "train()" if is_training else "eval()",
            self._run.state.updates,
        )


def read_latest(run: Run) -> dict[str, float]:
    """Return the latest value of each metric of this attempt, by `split/name`."""
    hooks = run.hooks.by_label.values()
    measured = [hook.metrics for hook in hooks if isinstance(hook, LatestMetrics)]
    return {name: value for metrics in measured for name, value in metrics.items()}


def has_custom_code(run: Run) -> bool:
    """Return whether the task or a hook is not one of phasetrain."""
    hooks = run.hooks.by_label.values()
    return any(is_custom(type(part)) for part in (run.task, *hooks))


def read_modes(task: Task) -> dict[str, bool]:
    """Return whether each module is in training mode, by the path of the module."""
    return {path: module.training for path, module in list_named_modules(task)}
