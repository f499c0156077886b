"""Runs a pruned sweep: all runs up to the first rung, the best of them up to the next one.

The sweep keeps no state. The progress and the metrics of runs are read from their folders, and the
decisions follow from them, so a killed sweep makes the same ones when it is started again.
"""

import math
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phasetrain.addons.experiments.sweep.jobs import Job, JobRecord, read_job_records
from phasetrain.addons.experiments.sweep.override_text import SweepOverrides, hash_overrides
from phasetrain.addons.experiments.sweep.prune.brackets import (
    FAILED,
    PENDING,
    Bracket,
    Outcome,
    Standing,
    decide,
    find_bracket,
    make_brackets,
)
from phasetrain.addons.experiments.sweep.prune.describe import (
    check_unchanged,
    describe_decisions,
    describe_settings,
)
from phasetrain.addons.experiments.sweep.prune.rungs import (
    TrialPlan,
    check_levels,
    check_runs,
    choose_levels,
    place_rungs,
)
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.addons.experiments.sweep.prune.trial_plan import drop_pause
from phasetrain.addons.experiments.sweep.prune_record import PruneRecord
from phasetrain.addons.experiments.sweep.study import Trials
from phasetrain.config.compose.override_text import quote_value
from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.runs.direction import Objective, resolve_objective
from phasetrain.runs.history import read_history
from phasetrain.runs.view import RunView, read_status

IDLE_ATTEMPTS = 3
"""Times that a run may be killed in a row without a further update, before it counts as failed."""

Planner = Callable[[Sequence[str], str], TrialPlan]
"""Overrides of a run and the metric of the sweep -> its plan."""

Launch = Callable[[Sequence[tuple[int, Sequence[str]]], Mapping[str, int]], int]
"""Runs numbered lists of overrides, given name -> update at which a run pauses; returns 0 unless
they could not be launched."""


@dataclass(frozen=True)
class PrunedTrial:
    """A run of the sweep.

    Attributes:
        number: its number, from 1.
        words: its swept overrides.
        plan: its plan.
        rungs: the updates at which it pauses.
        record: its record before it was started.
    """

    number: int
    words: tuple[str, ...]
    plan: TrialPlan
    rungs: tuple[int, ...]
    record: JobRecord

    def pause_at(self, rung: int) -> int | None:
        """Return the update of a rung; None for the end of the run."""
        if rung < len(self.rungs):
            return self.rungs[rung]
        return None


class PrunedSweep:
    """Promotes the best runs from rung to rung.

    Args:
        job: settings that all runs share.
        settings: how the sweep is pruned.
        monitor: metric by which runs are compared, with a minus sign if smaller is better.
        make_plan: plans a run.
        launch: starts runs.
        say: prints a line.

    Raises:
        ConfigError: there is no metric (`sweep.no_monitor`), or an earlier call had other settings
            (`sweep.prune_changed`).
    """

    def __init__(
        self,
        job: Job,
        settings: PruneSettings,
        monitor: str,
        make_plan: Planner,
        launch: Launch,
        say: Callable[[str], None],
    ) -> None:
        if not monitor:
            raise ConfigError(
                "CHECKPOINT.best.monitor = null: there is nothing to compare runs by; name a "
                "metric, such as valid/accuracy, or -valid/loss if smaller is better",
                code="sweep.no_monitor",
            )
        self.job = job
        self.settings = settings
        self.monitor = monitor
        self.make_plan = make_plan
        self.launch = launch
        self.say = say
        self.levels = 0
        self.trials: dict[str, PrunedTrial] = {}
        # Planning opens datasets, and a grid is planned twice: to choose its rungs, and to run it.
        self._plans: dict[str, TrialPlan] = {}
        self._shown = 0
        # name -> the rung on the way to which it failed: earlier decisions stay as they were
        self._failed: dict[str, int] = {}
        self._started = set[str]()
        # Checked here, before the first run: a folder with other rungs cannot be continued.
        self._described = describe_settings(settings, monitor)
        self._earlier = check_unchanged(job.folder, self._described)

    def prepare(self, samples: Sequence[Sequence[str]], runs: int) -> None:
        """Choose the rungs, and reject runs that cannot be pruned.

        Args:
            samples: swept overrides of runs that together hold each value at least once.
            runs: number of runs.

        Raises:
            ConfigError: see `choose_levels` and `plan_trial`.
        """
        plans = [self._plan(words) for words in samples]
        if self._earlier is not None and self.settings.min is None:
            # More runs than before would have more rungs, and runs have already paused at these.
            self.levels = self._earlier.levels
            check_levels(plans, self.settings, self.levels)
            check_runs(self.settings, self.levels, runs)
        else:
            self.levels = choose_levels(plans, self.settings, runs)
        updates = {
            ", ".join(map(str, [*place_rungs(plan, self.settings, self.levels), plan.updates]))
            for plan in plans
        }
        self.say(
            f"{self.settings.name} with eta {self.settings.eta}: runs are compared by "
            f"{self.monitor} at updates {'; or '.join(sorted(updates))}"
        )

    def run_grid(self, grid: Sequence[Sequence[str]]) -> int:
        """Run combinations, and return 0, or the exit code of a launcher that could not launch.

        Args:
            grid: swept overrides of each run.
        """
        for swept in grid:
            self.add_trial(swept)
        # By name, which is a hash: in the order of the values a bracket of Hyperband would have
        # runs with one learning rate.
        return self._advance(make_brackets(self.settings, self.levels, sorted(self.trials)))

    def run_trials(self, words: SweepOverrides, count: int) -> int:
        """Run the suggestions of Optuna, and return as `run_grid`.

        Each bracket has its own study, which learns from the results at the first rung of the
        bracket: results at different rungs cannot be compared.

        Args:
            words: overrides of the command line.
            count: number of trials.
        """
        sizes = Counter(find_bracket(self.settings, self.levels, n) for n in range(count))
        brackets = []
        for first, size in sorted(sizes.items()):
            name = f"{self.settings.name} {first + 1}"
            study = _RungTrials(self, first, words, name, size)
            # The trials of a sweep that was killed, before the study adds others.
            for swept in study.list_runs():
                self.add_trial(swept)
            code = study.run()
            if code or self._is_stopping():
                return code
            runs = [self.add_trial(swept) for swept in study.list_runs()]
            brackets.append(Bracket(first, tuple(dict.fromkeys(runs))))
        return self._advance(brackets)

    def reach(self, names: Sequence[str], rung: int) -> int:
        """Run trials until each has reached a rung or failed; returns as `run_grid`."""
        return self._reach(dict.fromkeys(names, rung))

    def look_up(self, name: str, rung: int) -> Outcome:
        """Return the outcome of a run at a rung."""
        # A run that has failed keeps its results at earlier rungs, on which decisions were based.
        if rung >= self._failed.get(name, rung + 1):
            return FAILED
        trial = self.trials[name]
        run = RunView(trial.record.folder)
        status = run.status
        pause = trial.pause_at(rung)
        is_over = status.state == "finished"
        if not is_over and pause is None:
            return PENDING
        # A run that was killed right after a test has its result, and no checkpoint there.
        is_past = pause is not None and (status.updates > pause or status.resumed_at >= pause)
        is_there = pause is not None and status.state == "paused" and status.updates >= pause
        if not (is_over or is_past or is_there) or not self._is_current(trial, run):
            return PENDING
        return Outcome(is_known=True, score=self._read_score(trial, pause, is_over=is_over))

    def add_trial(self, swept: Sequence[str]) -> str:
        """Plan a run, and return its name; one that cannot be planned is recorded as failed.

        Args:
            swept: its swept overrides.
        """
        record = self.job.make_record(swept)
        name = hash_overrides(record.overrides)
        if name in self.trials:
            return name
        number = len(self.trials) + 1
        try:
            plan = self._plan(swept)
            others = [trial.plan for trial in self.trials.values() if trial.rungs]
            check_levels([plan, *others], self.settings, self.levels)
            rungs = place_rungs(plan, self.settings, self.levels)
        except ConfigError as error:
            # A sampler has drawn it: the others do not depend on it.
            self.say(f"run {number} ({' '.join(swept)}): {error}")
            replace(record, exit_code=error.exit_code).write(self.job.folder)
            self._failed[name] = 0
            plan = TrialPlan(0, (), ())
            rungs = ()
        self.trials[name] = PrunedTrial(number, tuple(swept), plan, rungs, record)
        return name

    def _plan(self, swept: Sequence[str]) -> TrialPlan:
        record = self.job.make_record(swept)
        name = hash_overrides(record.overrides)
        if name not in self._plans:
            words = [*record.overrides, f"RUN.dir={quote_value(record.folder)}"]
            self._plans[name] = self.make_plan(words, self.monitor)
        return self._plans[name]

    def _advance(self, brackets: Sequence[Bracket]) -> int:
        while True:
            standings = {
                bracket.first: decide(bracket, self.levels, self.settings.eta, self.look_up)
                for bracket in brackets
            }
            self._report(standings)
            wanted: dict[str, int] = {}
            for standing in standings.values():
                for name in standing.waiting:
                    # Two brackets of Optuna may have drawn the same values.
                    wanted[name] = max(standing.rung, wanted.get(name, 0))
            if not wanted:
                return 0
            code = self._reach(wanted)
            if code or self._is_stopping():
                return code

    def _report(self, standings: Mapping[int, Standing]) -> None:
        decisions = describe_decisions(standings, Objective.parse(self.monitor).direction)
        rungs = {name: trial.rungs for name, trial in self.trials.items()}
        record = PruneRecord(self._described, self.levels, rungs, tuple(decisions))
        record.write(self.job.folder)
        for decision in decisions[self._shown :]:
            rung_text = f"rung {decision['rung']} of {self.levels + 1}"
            if len(standings) > 1:
                rung_text = f"bracket {decision['bracket']}, {rung_text}"
            promoted = len(decision["promoted"])
            self.say(f"{rung_text}: {promoted} of {len(decision['values'])} runs continue")
        self._shown = len(decisions)

    def _reach(self, wanted: Mapping[str, int]) -> int:
        idle = Counter[str]()
        while True:
            names = [name for name, rung in wanted.items() if not self.look_up(name, rung).is_known]
            if not names:
                return 0
            # A run may be killed by a machine any number of times, if it gets further in between.
            before = {name: self._count_updates(name) for name in names}
            pauses = {name: self.trials[name].pause_at(wanted[name]) for name in names}
            runs = [(self.trials[name].number, self.trials[name].words) for name in names]
            code = self.launch(runs, {name: at for name, at in pauses.items() if at is not None})
            if code or self._is_stopping():
                return code
            self._started.update(names)
            codes = {
                hash_overrides(record.overrides): record.exit_code
                for record in read_job_records(self.job.folder)
            }
            for name in names:
                if codes.get(name) == FolderInUseError.exit_code:
                    # Another process trains it and will write the result.
                    return FolderInUseError.exit_code
                idle[name] += 1
                if self._count_updates(name) > before[name]:
                    idle[name] = 0
                has_ended = self.look_up(name, wanted[name]).is_known
                if not has_ended and (_has_failed(codes.get(name)) or idle[name] >= IDLE_ATTEMPTS):
                    self._failed[name] = wanted[name]

    def _is_stopping(self) -> bool:
        return bool(self.job.stop.signal_number())

    def _count_updates(self, name: str) -> int:
        return read_status(self.trials[name].record.folder).updates

    def _is_current(self, trial: PrunedTrial, run: RunView) -> bool:
        """Return whether a run was made with the config that it would be started with; if not, it
        is started, and the rules of a resume decide."""
        name = Path(trial.record.folder).name
        if name in self._started:
            # The resume has accepted its config, and keys without effect may be written otherwise.
            return True
        return drop_pause(run.config_text) == trial.plan.config

    def _read_score(self, trial: PrunedTrial, pause: int | None, *, is_over: bool) -> float | None:
        """Return the score at a rung, or the last one of a run that ended before it."""
        history = read_history(trial.record.folder)
        objective = resolve_objective(self.monitor, history.directions)
        metric = objective.metric
        end = trial.plan.updates if pause is None else pause
        measured = [
            (row["updates"], row[metric])
            for row in history
            if row["kind"] == "phase" and metric in row and row["updates"] <= end
        ]
        if not measured:
            return None
        updates, value = measured[-1]
        # An earlier value counts only for a run that ended by itself, as by early stopping.
        if (updates != end and not is_over) or not math.isfinite(value):
            return None
        return objective.direction.score(float(value))


class _RungTrials(Trials):
    """Asks a study for runs, and reports to it their values at the first rung of a bracket."""

    def __init__(
        self, sweep: PrunedSweep, rung: int, words: SweepOverrides, name: str, count: int
    ) -> None:
        super().__init__(words, sweep.job, self._launch_to_rung, name, count)
        self.sweep = sweep
        self.rung = rung

    def _launch_to_rung(self, runs: Sequence[tuple[int, Sequence[str]]]) -> int:
        return self.sweep.reach([self.sweep.add_trial(swept) for _, swept in runs], self.rung)

    def measure(self, codes: Mapping[str, int | None], names: Sequence[str]) -> dict[str, float]:
        """Return name -> value at the rung, of the runs that have reached it."""
        scores = {name: self.sweep.look_up(name, self.rung).score for name in names}
        # The study knows the direction: it is told values, not scores.
        direction = Objective.parse(self.monitor).direction
        return {name: direction.score(score) for name, score in scores.items() if score is not None}


def _has_failed(code: int | None) -> bool:
    """Return whether an exit code is of a run that would fail again, and not of a killed one."""
    return code is not None and 0 < code < 128 + signal.SIGHUP
