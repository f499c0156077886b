"""Optuna chooses the values of a sweep: `hydra/sweeper=optuna`, for today's Optuna.

Source: Akiba et al. 2019, doi:10.1145/3292500.3330701; Optuna's ask-and-tell interface.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phasetrain.commands.sweep.jobs import Job, records
from phasetrain.commands.sweep.override_text import SWEEPER_KEY, WHERE, Words, digest
from phasetrain.commands.sweep.results import Results
from phasetrain.errors import ConfigError, FolderInUseError, did_you_mean

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

FILE = "study.journal"
"""Optuna's journal of the study in the sweep folder."""

SAMPLERS = MappingProxyType({"tpe": "TPESampler", "random": "RandomSampler", "gp": "GPSampler"})
"""Name -> class in optuna.samplers."""

Launch = Callable[[Sequence[tuple[int, Sequence[str]]]], int]
"""Runs numbered lists of words, and returns 0 unless nothing could be launched."""


@dataclass
class Settings:
    """What stands under `hydra.sweeper`, with its defaults.

    Attributes:
        n_trials: runs in all; a study that has fewer goes on.
        n_jobs: runs that are launched together, and know nothing of each other's results.
        sampler: one of SAMPLERS.
        seed: of the sampler: the study is a function of it, the space and what the runs measure.
        monitor: the metric, with a minus sign where smaller is better; CHECKPOINT.best.monitor, or
            the first metric of the first test, by default.
        options: parameters of the sampler.
    """

    n_trials: int = 20
    n_jobs: int = 1
    sampler: str = "tpe"
    seed: int = 0
    monitor: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, overrides: Iterable[Override]) -> "Settings":
        """Read words such as `hydra.sweeper.n_trials=20`.

        Raises:
            ConfigError: an unknown key, or a bad value.
        """
        config = OmegaConf.structured(cls)
        names = list(cls.__dataclass_fields__)
        for one in overrides:
            key = one.key_or_group.removeprefix(f"{WHERE}.")
            if key.partition(".")[0] not in names:
                near = did_you_mean(key, names) or "."
                raise ConfigError(
                    f"{one.input_line}: {WHERE} has no such key{near} Known: {', '.join(names)}"
                )
            try:
                OmegaConf.update(config, key, one.value(), force_add=key.startswith("options."))
            except OmegaConfBaseException as error:
                raise ConfigError(f"{one.input_line}: {str(error).splitlines()[0]}") from error
        found: Settings = OmegaConf.to_object(config)  # type: ignore[assignment]
        found._check()
        return found

    def _check(self) -> None:
        for name, value in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs)):
            if value < 1:
                raise ConfigError(f"{WHERE}.{name} = {value}: expected at least 1")
        if self.sampler not in SAMPLERS:
            near = did_you_mean(self.sampler, SAMPLERS) or "."
            raise ConfigError(
                f"{WHERE}.sampler = {self.sampler!r}: no such sampler{near} Known: {', '.join(SAMPLERS)}"
            )


class Trials:
    """Asks a study for values, has them run, and tells it what was measured.

    All that a study knows is in its journal, and the sampler is seeded by the number of each trial,
    so a sweep that was killed goes on with the same trials.

    Args:
        words: the command line.
        job: what the runs have in common.
        launch: runs some of them.

    Raises:
        ConfigError: a bad value, or Optuna is not installed.
    """

    def __init__(self, words: Words, job: Job, launch: Launch) -> None:
        if not words.swept:
            raise ConfigError(
                f"{SWEEPER_KEY}=optuna: nothing is swept; give a range, as in OPTIMIZER.lr=interval(0.01,1)"
            )
        self.settings = Settings.read(words.sweeper_words)
        self.job = job
        self.launch = launch
        self.monitor = self.settings.monitor or job.monitor
        if not self.monitor:
            raise ConfigError(
                f"{WHERE}.monitor: there is nothing to compare runs by; name a metric, such as test/accuracy, or "
                "-test/loss where smaller is better"
            )
        self.space = {one.key_or_group: distribution(one) for one in words.swept}
        self._failed = 0

    def run(self) -> int:
        """Run what has failed before once more, and new trials until there are `n_trials`.

        Returns 0, or the exit code of a launcher that could not launch.
        """
        study = self._study()
        self._again(study)
        while not self._failed and not self.job.stop.asked() and (batch := self._batch(study)):
            measured = self._launched(batch)
            if self._failed or self.job.stop.asked():
                break  # these trials stay open, and go on with the same command
            for trial in batch:
                value = measured.get(self._name(trial))
                fails = None if value is not None else _optuna().trial.TrialState.FAIL
                study.tell(trial.number, value, state=fails)
        return self._failed

    def _study(self) -> "Study":
        optuna = _optuna()
        path = Path(self.job.folder, FILE)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _cut_torn_line(path)
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(path))
            study: Study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="sweep",
                direction="minimize" if self.monitor.startswith("-") else "maximize",
                load_if_exists=True,
            )
        except OSError:
            raise
        except Exception as error:  # its content may be anything
            raise ConfigError(
                f"{path} cannot be read as a study ({type(error).__name__}: {error}); move it away to begin anew, in "
                "which runs with equal values are not made again, or give another folder with hydra.sweep.dir=FOLDER"
            ) from error
        space = {
            key: optuna.distributions.distribution_to_json(one) for key, one in self.space.items()
        }
        self._same(study, f"{WHERE}.monitor", "monitor", self.monitor)
        self._same(study, "what is swept", "space", space)
        return study

    def _same(self, study: "Study", what: str, name: str, value: Any) -> None:
        """Refuse a study that was made with another value."""
        before = study.user_attrs.get(name)
        if before not in (None, value):
            raise ConfigError(
                f"{what} is {value!r}, and the study in {self.job.folder} was made with {before!r}; give this one a "
                "folder of its own with hydra.sweep.dir=FOLDER"
            )
        if before is None:
            study.set_user_attr(name, value)

    def _batch(self, study: "Study") -> "list[FrozenTrial]":
        """Return the trials that are to run next: those that were interrupted, and new ones."""
        size = self.settings.n_jobs
        running = _optuna().trial.TrialState.RUNNING
        trials = study.get_trials(deepcopy=False)
        first = next((one.number for one in trials if one.state == running), len(trials))
        first -= first % size
        for number in range(len(trials), min(first + size, self.settings.n_trials)):
            study.sampler = self._sampler(number)
            study.ask(self.space)
        return [
            one
            for one in study.get_trials(deepcopy=False)[first : first + size]
            if one.state == running
        ]

    def _sampler(self, number: int) -> Any:
        """Return the sampler of a trial; what it draws is a function of the number and of the
        trials before."""
        settings = self.settings
        kind = vars(_optuna().samplers)[SAMPLERS[settings.sampler]]
        text = f"{settings.seed} {number}"
        seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest())
        try:
            return kind(seed=seed, **settings.options)
        except TypeError as error:
            raise ConfigError(f"{WHERE}.options = {settings.options}: {error}") from error

    def _again(self, study: "Study") -> None:
        """Run what has failed before; what ends well now is a trial of its own."""
        states = _optuna().trial.TrialState
        create = _optuna().trial.create_trial
        trials = study.get_trials(deepcopy=False)
        others = {self._name(one) for one in trials if one.state != states.FAIL}
        waiting = iter(
            {name: one for one in trials if (name := self._name(one)) not in others}.values()
        )
        while not self._failed and not self.job.stop.asked():
            if not (batch := list(islice(waiting, self.settings.n_jobs))):
                return
            measured = self._launched(batch)
            for trial in batch:
                if (value := measured.get(self._name(trial))) is not None:
                    study.add_trial(
                        create(params=trial.params, distributions=trial.distributions, value=value)
                    )

    def _launched(self, batch: "Sequence[FrozenTrial]") -> dict[str, float]:
        """Run trials, equal ones once; return by name what those that ended well have measured."""
        runs = {self._name(one): (one.number + 1, _words(one)) for one in batch}
        self._failed = self.launch(list(runs.values()))
        codes = {digest(one.overrides): one.exit_code for one in records(self.job.folder)}
        if any(codes.get(name) == FolderInUseError.exit_code for name in runs):
            self._failed = (
                FolderInUseError.exit_code
            )  # somebody else is at it, who will bring the result
        return {
            one.name: one.best
            for one in Results.read(self.job.folder, self.monitor).runs
            if one.name in runs
            and codes.get(one.name) == 0
            and one.metric == self.monitor.removeprefix("-")
            and one.best is not None
            and math.isfinite(one.best)
        }

    def _name(self, trial: "FrozenTrial") -> str:
        return digest([*self.job.fixed, *_words(trial)])


def distribution(override: Override) -> Any:
    """Return what a swept word of the command line lets Optuna choose from.

    `a,b` and `choice(a,b)` are categories; `range(1,9)` numbers in order; `interval(0.1,1)` any
    number between, whole ones as `int(interval(1,8))`; `tag(log,interval(1e-4,1))` by their
    logarithm.

    Raises:
        ConfigError: bounds that are none.
    """
    kinds = _optuna().distributions
    value = override.value()
    logarithmic = isinstance(value, IntervalSweep | RangeSweep) and "log" in value.tags
    try:
        if (
            isinstance(value, IntervalSweep)
            and isinstance(value.start, int)
            and isinstance(value.end, int)
        ):
            return kinds.IntDistribution(value.start, value.end, log=logarithmic)
        if isinstance(value, IntervalSweep):
            return kinds.FloatDistribution(value.start, value.end, log=logarithmic)
        if isinstance(value, RangeSweep) and not logarithmic and (numbers := list(value.range())):
            kind = kinds.IntDistribution if isinstance(numbers[0], int) else kinds.FloatDistribution
            return kind(numbers[0], numbers[-1], step=value.step)
        return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: {error}") from error


def _cut_torn_line(path: Path) -> None:
    """Take away the end of a line that a full disk has cut short; nothing can be appended to it."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _words(trial: "FrozenTrial") -> list[str]:
    return [
        f"{key}={one!r}" if isinstance(one, float) else f"{key}={one}"
        for key, one in trial.params.items()
    ]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f'{SWEEPER_KEY}=optuna needs Optuna ({error}); install it with `pip install "phasetrain[sweep]"`'
        ) from error
    return optuna
