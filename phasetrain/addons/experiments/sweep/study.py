"""Optuna suggests the values of a sweep: `hydra/sweeper=optuna`.

Source: Akiba et al. 2019, doi:10.1145/3292500.3330701; Optuna's ask-and-tell interface.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phasetrain.addons.experiments.sweep.jobs import Job, read_job_records
from phasetrain.addons.experiments.sweep.override_text import (
    SWEEPER_KEY,
    WHERE,
    SweepOverrides,
    hash_overrides,
)
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.errors import ConfigError, FolderInUseError, did_you_mean
from phasetrain.runs.direction import Direction, Objective

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

STUDY = "sweep"
"""Name of the study of a sweep that is not pruned."""

JOURNAL_FILE = "study.journal"
"""Optuna's journal of the study in the sweep folder."""

SAMPLERS = MappingProxyType({"tpe": "TPESampler", "random": "RandomSampler", "gp": "GPSampler"})
"""Name -> class in optuna.samplers."""

Launch = Callable[[Sequence[tuple[int, Sequence[str]]]], int]
"""Runs numbered lists of overrides; returns 0 unless they could not be launched."""


@dataclass
class StudySettings:
    """The section `hydra.sweeper`.

    Attributes:
        n_trials: total number of configs; a study that has fewer is continued.
        n_jobs: configs that are launched together, so that none of them knows the others' results.
        sampler: one of SAMPLERS.
        seed: seed of the sampler: the study is a function of the seed, the space and the results.
        monitor: the metric, with a minus sign if smaller is better; by default
            CHECKPOINT.best.monitor, or the first metric of the first test.
        options: parameters of the sampler.
    """

    n_trials: int = 20
    n_jobs: int = 1
    sampler: str = "tpe"
    seed: int = 0
    monitor: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, overrides: Iterable[Override]) -> "StudySettings":
        """Read overrides such as `hydra.sweeper.n_trials=20`.

        Raises:
            ConfigError: an unknown key (`sweep.unknown_key`), or a bad value.
        """
        config = OmegaConf.structured(cls)
        names = list(cls.__dataclass_fields__)
        for override in overrides:
            key = override.key_or_group.removeprefix(f"{WHERE}.")
            if key.partition(".")[0] not in names:
                near = did_you_mean(key, names) or "."
                raise ConfigError(
                    f"{override.input_line}: {WHERE} has no such key{near} Known: "
                    f"{', '.join(names)}",
                    code="sweep.unknown_key",
                )
            try:
                OmegaConf.update(
                    config, key, override.value(), force_add=key.startswith("options.")
                )
            except OmegaConfBaseException as error:
                raise ConfigError(f"{override.input_line}: {str(error).splitlines()[0]}") from error
        settings: StudySettings = OmegaConf.to_object(config)  # type: ignore[assignment]
        settings._check()
        return settings

    def _check(self) -> None:
        for name, value in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs)):
            if value < 1:
                raise ConfigError(f"{WHERE}.{name} = {value}: expected at least 1")
        if self.sampler not in SAMPLERS:
            near = did_you_mean(self.sampler, SAMPLERS) or "."
            raise ConfigError(
                f"{WHERE}.sampler = {self.sampler!r}: no such sampler{near} Known: "
                f"{', '.join(SAMPLERS)}",
                code="sweep.unknown_sampler",
            )


class Trials:
    """Asks a study for values, runs them, and reports the results to it.

    Folds and seeds are not chosen by the study: each trial runs once per fold and seed, and its
    value is the mean of the best values of these runs. It has failed if one of them has.

    The study is in its journal, and the sampler is seeded by the number of each trial, so a sweep
    that was killed resumes with the same trials.

    Args:
        words: overrides of the command line.
        job: settings that all runs share.
        launch: runs some of them.
        name: name of the study in the journal; other studies of one sweep have other suggestions.
        count: number of trials; by default `hydra.sweeper.n_trials`.

    Raises:
        ConfigError: a bad value, or Optuna is not installed.
    """

    def __init__(
        self,
        words: SweepOverrides,
        job: Job,
        launch: Launch,
        name: str = STUDY,
        count: int | None = None,
    ) -> None:
        repeated = words.repeated
        chosen = [override for override in words.swept if override not in repeated]
        if not chosen:
            raise ConfigError(
                f"{SWEEPER_KEY}=optuna: nothing is swept; give a range, as in "
                "OPTIMIZER.lr=interval(0.01,1)",
                code="sweep.nothing_swept",
            )
        self.settings = StudySettings.read(words.sweeper_words)
        self.job = job
        self.launch = launch
        self.monitor = self.settings.monitor or job.monitor
        if not self.monitor:
            raise ConfigError(
                f"{WHERE}.monitor: there is nothing to compare runs by; name a metric, such as "
                "valid/accuracy, or -valid/loss if smaller is better",
                code="sweep.no_monitor",
            )
        self.name = name
        self.count = self.settings.n_trials if count is None else count
        self.space = {override.key_or_group: make_distribution(override) for override in chosen}
        self.repetitions = words.list_repetitions()
        self._exit_code = 0

    def run(self) -> int:
        """Repeat failed trials once, and run new ones until there are `n_trials`.

        Returns 0, or the exit code of a launcher that could not launch.
        """
        study = self.open_study()
        self._repeat_failed(study)
        while not self._has_ended() and (batch := self._ask_batch(study)):
            measured = self._launch_batch(batch)
            if self._has_ended():
                break  # these trials stay open, and are run when the sweep is resumed
            for trial in batch:
                value = measured.get(self._hash_trial(trial))
                state = None
                if value is None:
                    state = _import_optuna().trial.TrialState.FAIL
                study.tell(trial.number, value, state=state)
        return self._exit_code

    def _has_ended(self) -> bool:
        return bool(self._exit_code or self.job.stop.signal_number())

    def open_study(self) -> "Study":
        """Return the study in the journal of the sweep folder, created if there is none.

        Raises:
            ConfigError: it cannot be read (`sweep.study_unreadable`), or was made with another
                metric or search space (`sweep.study_changed`).
        """
        optuna = _import_optuna()
        path = Path(self.job.folder, JOURNAL_FILE)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _cut_torn_line(path)
        smaller = Objective.parse(self.monitor).direction is Direction.SMALLER
        # A journal and not SQLite, whose locks do not hold on network drives. Optuna replays it
        # when it is opened, so a killed sweep has all trials that were written.
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(path))
            study: Study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name=self.name,
                direction="minimize" if smaller else "maximize",
                load_if_exists=True,
            )
        except OSError:
            raise
        except Exception as error:  # Optuna raises any kind of error on a damaged journal
            raise ConfigError(
                f"{path} cannot be read as a study ({type(error).__name__}: {error}); move it away "
                "to start a new study, which does not repeat runs with equal values, or give "
                "another folder with hydra.sweep.dir=FOLDER",
                code="sweep.study_unreadable",
            ) from error
        space = {
            key: optuna.distributions.distribution_to_json(distribution)
            for key, distribution in self.space.items()
        }
        self._check_unchanged(study, f"{WHERE}.monitor", "monitor", self.monitor)
        self._check_unchanged(study, "the search space", "space", space)
        return study

    def _check_unchanged(self, study: "Study", what: str, name: str, value: Any) -> None:
        """Raise ConfigError if the study was made with another value."""
        before = study.user_attrs.get(name)
        if before not in (None, value):
            raise ConfigError(
                f"{what} is {value!r}, and the study in {self.job.folder} was made with "
                f"{before!r}; give another folder with hydra.sweep.dir=FOLDER",
                code="sweep.study_changed",
            )
        if before is None:
            study.set_user_attr(name, value)

    def _ask_batch(self, study: "Study") -> "list[FrozenTrial]":
        """Return the next trials to run: interrupted ones, and new ones."""
        size = self.settings.n_jobs
        running = _import_optuna().trial.TrialState.RUNNING
        trials = study.get_trials(deepcopy=False)
        first = next((trial.number for trial in trials if trial.state == running), len(trials))
        # Batches begin at multiples of their size, so that a resumed sweep asks for the same ones.
        first -= first % size
        for number in range(len(trials), min(first + size, self.count)):
            study.sampler = self._make_sampler(number)
            study.ask(self.space)
        return [
            trial
            for trial in study.get_trials(deepcopy=False)[first : first + size]
            if trial.state == running
        ]

    def _make_sampler(self, number: int) -> Any:
        """Return the sampler of a trial; its values are a function of the number and of earlier
        trials."""
        settings = self.settings
        sampler_class = vars(_import_optuna().samplers)[SAMPLERS[settings.sampler]]
        # A sampler per trial, seeded by its number: the random state of one sampler for all would
        # be lost in a kill. Hashed, because neighbouring seeds may give similar values.
        text = f"{settings.seed} {number}"
        if self.name != STUDY:
            text += f" {self.name}"
        seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest())
        try:
            return sampler_class(seed=seed, **settings.options)
        except TypeError as error:
            raise ConfigError(
                f"{WHERE}.options = {settings.options}: {error}; expected parameters of "
                f"optuna's {sampler_class.__name__}",
                code="sweep.bad_option",
            ) from error

    def _repeat_failed(self, study: "Study") -> None:
        """Run failed trials again; each one that succeeds is added as a new trial, because Optuna
        cannot change the state of an old one."""
        states = _import_optuna().trial.TrialState
        create = _import_optuna().trial.create_trial
        trials = study.get_trials(deepcopy=False)
        others = {self._hash_trial(trial) for trial in trials if trial.state != states.FAIL}
        by_name = {self._hash_trial(trial): trial for trial in trials}
        waiting = iter([trial for name, trial in by_name.items() if name not in others])
        while not self._has_ended():
            if not (batch := list(islice(waiting, self.settings.n_jobs))):
                return
            measured = self._launch_batch(batch)
            for trial in batch:
                if (value := measured.get(self._hash_trial(trial))) is not None:
                    study.add_trial(
                        create(params=trial.params, distributions=trial.distributions, value=value)
                    )

    def _launch_batch(self, batch: "Sequence[FrozenTrial]") -> dict[str, float]:
        """Run trials, equal ones once; return hash -> value of those that succeeded."""
        # A sampler may suggest the same values twice: they would be two runs in one folder.
        runs = {
            self._hash_run(trial, repetition): (
                trial.number * len(self.repetitions) + number,
                [*_list_words(trial), *repetition],
            )
            for trial in batch
            for number, repetition in enumerate(self.repetitions, start=1)
        }
        self._exit_code = self.launch(list(runs.values()))
        codes = {
            hash_overrides(record.overrides): record.exit_code
            for record in read_job_records(self.job.folder)
        }
        if any(codes.get(name) == FolderInUseError.exit_code for name in runs):
            # Another process trains this run and will write the result: stop, the trial stays open.
            self._exit_code = FolderInUseError.exit_code
        values_of_runs = self.measure(codes, list(runs))
        measured = {}
        for trial in batch:
            values = [
                values_of_runs.get(self._hash_run(trial, repetition))
                for repetition in self.repetitions
            ]
            finite = [value for value in values if value is not None]
            # The mean of the other seeds would reward a config for the seeds that diverge.
            if len(finite) == len(values):
                measured[self._hash_trial(trial)] = fmean(finite)
        return measured

    def measure(self, codes: Mapping[str, int | None], names: Sequence[str]) -> dict[str, float]:
        """Return name -> best value of the runs that succeeded.

        Args:
            codes: name -> exit code of runs.
            names: the runs to look at.
        """
        metric = Objective.parse(self.monitor).metric
        return {
            run.name: run.best
            for run in Results.read(self.job.folder, self.monitor).runs
            if run.name in names
            and codes.get(run.name) == 0
            and run.metric == metric
            and run.best is not None
            and math.isfinite(run.best)  # Optuna refuses NaN: a diverged run is a failed trial
        }

    def list_runs(self) -> list[list[str]]:
        """Return the swept overrides of all trials of the study, equal ones once."""
        trials = self.open_study().get_trials(deepcopy=False)
        # A repeated trial is a new one with equal values.
        return list({self._hash_trial(trial): _list_words(trial) for trial in trials}.values())

    def _hash_trial(self, trial: "FrozenTrial") -> str:
        return self._hash_run(trial)

    def _hash_run(self, trial: "FrozenTrial", repetition: Sequence[str] = ()) -> str:
        return hash_overrides([*self.job.fixed, *_list_words(trial), *repetition])


def make_distribution(override: Override) -> Any:
    """Return the distribution from which Optuna draws the values of a swept override.

    `a,b` and `choice(a,b)` are categories; `range(1,9)` is a grid of numbers; `interval(0.1,1)` a
    range of floats, `int(interval(1,8))` of integers; `tag(log,interval(1e-4,1))` is uniform in the
    logarithm.

    Raises:
        ConfigError: invalid bounds (code `sweep.bad_range`).
    """
    distributions = _import_optuna().distributions
    value = override.value()
    logarithmic = isinstance(value, IntervalSweep | RangeSweep) and "log" in value.tags
    try:
        if (
            isinstance(value, IntervalSweep)
            and isinstance(value.start, int)
            and isinstance(value.end, int)
        ):
            return distributions.IntDistribution(value.start, value.end, log=logarithmic)
        if isinstance(value, IntervalSweep):
            return distributions.FloatDistribution(value.start, value.end, log=logarithmic)
        if isinstance(value, RangeSweep) and not logarithmic and (numbers := list(value.range())):
            # The last number and not `value.stop`, which a range leaves out.
            distribution_class = distributions.FloatDistribution
            if isinstance(numbers[0], int):
                distribution_class = distributions.IntDistribution
            return distribution_class(numbers[0], numbers[-1], step=value.step)
        return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: {error}", code="sweep.bad_range") from error


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that a full disk has cut short: Optuna would append to it."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _list_words(trial: "FrozenTrial") -> list[str]:
    # repr of a float is exact; of a text it would add quotes
    return [
        f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}"
        for key, value in trial.params.items()
    ]


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"{SWEEPER_KEY}=optuna needs Optuna ({error}); install it with "
            '`pip install "phasetrain[sweep]"`',
            code="install.missing",
        ) from error
    return optuna
