"""The runs of contenders: found among finished ones, or trained."""

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from phasetrain.addons.experiments.judge.contenders import Contender
from phasetrain.addons.experiments.judge.processes import Launch
from phasetrain.addons.experiments.sweep.results import read_last_line
from phasetrain.checkpoint.promised import read_promised
from phasetrain.config.changes import compare_configs
from phasetrain.config.compose.override_text import quote_value
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError, PhasetrainError, did_you_mean
from phasetrain.runs.direction import Direction, Objective
from phasetrain.runs.history import History, read_history
from phasetrain.runs.owner import find_owner
from phasetrain.runs.view import RunView, read_status
from phasetrain.runtime.storage import open_storage

RUNS = "runs"
"""Folder of all runs."""

PREFIX = "judge-"
"""Start of the names of the folders in which runs are trained."""

POLL_SECONDS = 0.2
"""Interval at which a folder that is in use is looked at."""

Which = Literal["last", "best"]


class RunFailedError(PhasetrainError):
    """A run of a contender did not finish (exit code 1).

    Args:
        message: which run, and why.
        exit_code: exit code of its process.
        line: the last line of its output.

    Attributes:
        signature: equal for runs that fail for the same reason: the exit code, and the first word
            of the last line without numbers.
    """

    default_code = "judge.run_failed"

    def __init__(self, message: str, exit_code: int, line: str) -> None:
        super().__init__(message)
        word = re.sub(r"\d+", "", line.partition(" ")[0])
        self.signature = f"{exit_code} {word}".strip()


@dataclass(frozen=True)
class TrainedRun:
    """A run of a contender.

    Attributes:
        view: its folder, after its end.
        seed: its seed.
        is_found: whether it was there already, not made by `judge`.
    """

    view: RunView
    seed: int
    is_found: bool = False

    @property
    def folder(self) -> str:
        """Path of its folder."""
        return self.view.path


@dataclass
class RunStore:
    """Finds or trains the runs of contenders.

    Attributes:
        launch: runs a process.
        root: folder of all runs.
        config_dir: folder with custom configs.
        trust: whether the code that a run folder names may run.
        reuses: whether finished runs that `judge` has not made are used.
        trained: folders of the runs that this call has trained.
    """

    launch: Launch
    root: str = RUNS
    config_dir: str | None = None
    trust: bool = False
    reuses: bool = True
    trained: list[str] = field(default_factory=list)
    _finished: list[RunView] | None = None

    def folder_of(self, contender: Contender) -> str:
        """Return the folder of the runs of a contender."""
        return f"{self.root}/{PREFIX}{contender.digest}"

    def get_run(self, contender: Contender, seed: int) -> TrainedRun:
        """Return the complete run of a contender with a seed; train it unless it has finished.

        Raises:
            PhasetrainError: it did not finish (code `judge.run_failed`).
        """
        finished = self._find_finished(contender, seed) if self.reuses else None
        if finished is not None:
            return TrainedRun(finished, seed, is_found=True)
        folder = f"{self.folder_of(contender)}/seed{seed}"
        if read_status(folder).state != "finished":
            self._train(contender, folder, [f"RUN.seed={seed}"], "finished")
        return TrainedRun(RunView(folder), seed)

    def get_short_run(self, contender: Contender, seed: int, updates: int) -> TrainedRun:
        """Return a run of a contender that was paused after some updates.

        Raises:
            PhasetrainError: it has not come so far (code `judge.run_failed`).
        """
        folder = f"{self.folder_of(contender)}/short{updates}-seed{seed}"
        # A run that is shorter than this has finished.
        if read_status(folder).state not in ("paused", "finished"):
            words = [f"RUN.seed={seed}", f"RUN.pause_at={updates}", *contender.facts.short_words]
            self._train(contender, folder, words, "paused")
        return TrainedRun(RunView(folder), seed)

    def _train(
        self, contender: Contender, folder: str, words: Sequence[str], expected: str
    ) -> None:
        path = Path(folder).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that a killed command has left behind may still train it.
        while find_owner(str(path), open_storage(str(path))) is not None:
            time.sleep(POLL_SECONDS)
        output = path.with_name(f"{path.name}.log")
        # Absolute folders, because a revision has another working directory.
        code = self.launch(
            self._list_words(contender, path, words), contender.working_folder, output
        )
        self.trained.append(folder)
        # A short run that ends before its pause has finished.
        state = read_status(path).state
        if state not in (expected, "finished"):
            line = read_last_line(output)
            raise RunFailedError(
                f"{contender.name}: the run in {folder} did not finish (exit code {code}, "
                f"{state or 'no status'}): {line}; see {output}, then re-run the command to resume",
                code,
                line,
            )

    def _list_words(self, contender: Contender, path: Path, words: Sequence[str]) -> list[str]:
        """Return the command line of a run."""
        command = ["phasetrain"]
        if contender.stored:
            # Its exit code says whether the runs are identical; here, their state counts.
            command += ["rerun", contender.stored]
            command += ["--trust"] if self.trust else []
        if self.config_dir is not None:
            command += ["--config-dir", str(Path(self.config_dir).absolute())]
        own = [f"RUN.dir={quote_value(str(path))}", "RUN.verbosity=quiet"]
        # A submitted run would return before it is trained.
        if contender.facts.config["LAUNCH"]["cluster"] is not None:
            own.append("LAUNCH.cluster=null")
        return [*command, *contender.words, *words, *own]

    def _find_finished(self, contender: Contender, seed: int) -> RunView | None:
        """Return a finished run that judge has not made; None if there is none."""
        # The files of a revision are gone, so nothing says whether a run was made with them.
        if contender.commit:
            return None
        # Once for all seeds: parsing a config takes tens of milliseconds.
        if self._finished is None:
            self._finished = list(_list_finished(self.root))
        own = [RunView(contender.stored)] if contender.stored else []
        for run in [*own, *self._finished]:
            if run.config.get("RUN", {}).get("seed") == seed and _matches(contender, run):
                return run
        return None


def _list_finished(root: str) -> Iterator[RunView]:
    """Yield the finished runs in a folder, sorted by name."""
    if not Path(root).is_dir():
        return
    for path in sorted(Path(root).iterdir()):
        run = RunView(path)
        # The status first, since reading it is cheap.
        if not path.name.startswith(PREFIX) and run.status.state == "finished":
            yield run


def _matches(contender: Contender, run: RunView) -> bool:
    """Return whether a finished run is one that the contender would train."""
    facts = contender.facts
    environment = run.environment
    versions = {name: environment.content.get(name) for name in facts.versions}
    if versions != dict(facts.versions) or environment.deviations:
        return False
    # The order of a reduction depends on the world size, and so does the result.
    if environment.processes != facts.config["LAUNCH"]["processes"]:
        return False
    return not list_config_changes(run.config, facts.config, facts.observers) and (
        read_promise(run.path).get("code", {}) == dict(facts.code)
    )


def list_config_changes(
    one: Mapping[str, Any], other: Mapping[str, Any], observers: Sequence[str]
) -> list[str]:
    """Return the keys that affect the bits of a run in which two resolved configs differ, except
    the seed.

    Args:
        one, other: the configs.
        observers: labels of the hooks that only observe.
    """
    schema = default_schema().with_observers(observers)
    return [
        change.path
        for change in compare_configs(one, other, schema)
        if change.resume != "free" and change.path != "RUN.seed"
    ]


def read_promise(folder: str) -> Mapping[str, Any]:
    """Return the record of code and data in the newest checkpoint of a run; empty without one."""
    try:
        return read_promised(folder, "latest", open_storage(folder))
    except PhasetrainError:
        return {}


def check_stored(contender: Contender) -> None:
    """Reject a run folder whose result cannot be compared.

    Raises:
        ConfigError: the run has not finished (code `judge.unfinished`), or other versions have
            trained it (code `judge.other_version`).
    """
    folder = contender.stored
    run = RunView(folder)
    state = run.status.observe_state()
    if state != "finished":
        raise ConfigError(
            f"{folder}: expected a finished run, it is {state or 'not started'}; resume it with "
            f"`phasetrain resume {folder}`, or judge its config alone with --fresh",
            code="judge.unfinished",
        )
    for name, version in contender.facts.versions.items():
        recorded = run.environment.content.get(name)
        if recorded != version:
            raise ConfigError(
                f"{folder}: it was trained with {name} {recorded}, and here is {version}: a "
                "difference could come from either; judge its config alone with --fresh",
                code="judge.other_version",
            )


def check_metric(folder: str, metric: str) -> None:
    """Reject a run that has not measured a metric.

    Raises:
        ConfigError: names those that it has measured (code `judge.no_metric`).
    """
    last = read_history(folder).last
    if metric not in last:
        near = did_you_mean(metric, last) or "."
        raise ConfigError(
            f"--metric {metric}: {folder} has no such metric{near} It has "
            f"{', '.join(last) or 'none'}",
            code="judge.no_metric",
        )


def resolve_objective(metric: str, baseline: TrainedRun, candidate: TrainedRun) -> Objective:
    """Return the metric of two runs with its direction: a minus sign decides, then the records of
    the runs.

    Raises:
        ConfigError: a run has no such metric, or nothing says which values are better (code
            `judge.no_direction`).
    """
    objective = Objective.parse(metric)
    for run in (baseline, candidate):
        check_metric(run.folder, objective.metric)
    if objective.direction is not Direction.LARGER:
        return objective
    directions = [find_direction(run, objective.metric) for run in (baseline, candidate)]
    # One run may be older than records of directions; two different records are an error.
    distinct = {direction for direction in directions if direction is not None}
    if len(distinct) != 1:
        raise ConfigError(
            f"--metric {metric}: the runs do not say which values are better; give "
            f"--metric -{objective.metric} if smaller ones are, or another metric",
            code="judge.no_direction",
        )
    return replace(objective, direction=distinct.pop())


def read_value(run: TrainedRun, objective: Objective, which: Which) -> float:
    """Return the value of the metric of a finished run that has measured it.

    Raises:
        ConfigError: it is not finite (code `judge.not_finite`).
    """
    history = read_history(run.view)
    value = history.last[objective.metric]
    if which == "best":
        best = history.best(objective.metric, objective.direction)
        value = math.nan if best is None else best.value
    if not math.isfinite(value):
        raise ConfigError(
            f"{objective.metric} = {value} in {run.folder}: nothing can be compared with it; "
            "choose another metric with --metric, or fix the run",
            code="judge.not_finite",
        )
    return value


def find_direction(run: TrainedRun, metric: str) -> Direction | None:
    """Return which values of a metric are better, as a run has recorded it, else by its name."""
    # plan.json has the names without the split, and is there before the first measurement.
    directions = run.view.plan.directions
    split, _, name = metric.partition("/")
    if name in directions:
        return directions[name]
    return History(
        directions={f"{split}/{other}": direction for other, direction in directions.items()}
    ).direction_of(metric)
