"""Parses the command line of a sweep: fixed overrides, swept overrides, and those for Hydra."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from itertools import product, zip_longest
from types import MappingProxyType

from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phasetrain.config.compose.overrides import is_seeds, make_override_parser
from phasetrain.errors import ConfigError

FOLDER_KEY = "hydra.sweep.dir"

SWEEPER_KEY = "hydra/sweeper"
WHERE = "hydra.sweeper"

PRUNE_KEY = f"{WHERE}.prune"

LAUNCHER_KEY = "hydra/launcher"

REPEATED = ("fold", "seed")
"""Last words of keys whose values repeat a config instead of changing it."""

LAUNCHERS = MappingProxyType(
    {
        "joblib": ("hydra_joblib_launcher", "joblib", "sweep"),
        "submitit_local": ("hydra_submitit_launcher", "submitit", "cluster"),
        "submitit_slurm": ("hydra_submitit_launcher", "submitit", "cluster"),
    }
)
"""Launcher -> its package below hydra_plugins, the library it needs, and the extra that installs
both."""

GROUP = "select."
"""Prefix of a swept config group. Hydra composes one config of all swept keys, in which a group
(`LOSS=a,b`) and a key below it (`LOSS.gamma=1,2`) cannot both be named LOSS."""


@dataclass
class SweepOverrides:
    """The overrides of the command line, by purpose.

    Attributes:
        fixed: overrides that all runs share, as given.
        swept: overrides with several values.
        hydra: overrides for Hydra, without the folder.
        given_folder: the sweep folder; None if it was not given.
        sweeper: `basic` runs all combinations; `optuna`, or another sweeper of Hydra, chooses
            values.
        sweeper_words: parameters of the sweeper.
        prune_words: `hydra.sweeper.prune` and keys below it.
    """

    fixed: list[str] = field(default_factory=list)
    swept: list[Override] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    given_folder: str | None = None
    sweeper: str = "basic"
    sweeper_words: list[Override] = field(default_factory=list)
    prune_words: list[Override] = field(default_factory=list)

    @classmethod
    def read(cls, overrides: Sequence[str]) -> "SweepOverrides":
        """Parse a command line.

        Raises:
            ConfigError: `RUN.dir` is given, which all runs would share (`sweep.shared_folder`);
                values are given by `glob(...)` (`sweep.glob`), or twice (`sweep.swept_twice`);
                `seeds(...)` for a key that is not a seed (`sweep.no_seed`); or a launcher is not
                installed (`install.missing`).
        """
        overrides_by_purpose = cls()
        parser = make_override_parser()
        for text in overrides:
            try:
                override = parser.parse_override(text)
            except HydraException:
                overrides_by_purpose.fixed.append(text)  # the check of the config reports it
            else:
                overrides_by_purpose._add(text, override)
        return overrides_by_purpose

    def _add(self, text: str, override: Override) -> None:
        key = override.key_or_group
        if key == "RUN.dir" and not override.is_delete():
            raise ConfigError(
                f"{text}: all runs of a sweep would share this folder; give "
                f"{FOLDER_KEY}=FOLDER instead",
                code="sweep.shared_folder",
            )
        # The order matters: `hydra.sweep.dir` and the sweeper are hydra overrides as well.
        if key == FOLDER_KEY:
            self.given_folder = str(override.value())
        elif key == LAUNCHER_KEY:
            _check_installed(str(override.value()))
            self.hydra.append(text)
        elif key == SWEEPER_KEY:
            self.sweeper = str(override.value())
        elif key.startswith(f"{WHERE}."):
            is_prune = key == PRUNE_KEY or key.startswith(f"{PRUNE_KEY}.")
            purpose = self.prune_words if is_prune else self.sweeper_words
            purpose.append(override)
        elif override.is_hydra_override():
            self.hydra.append(text)
        elif not override.is_sweep_override():
            self.fixed.append(text)
        else:
            self._add_swept(text, override)

    def _add_swept(self, text: str, override: Override) -> None:
        key = override.key_or_group
        if override.value_type is not None and override.value_type.name == "GLOB_CHOICE_SWEEP":
            raise ConfigError(
                f"{text}: glob() is not understood here; list the values, as in {key}=a,b",
                code="sweep.glob",
            )
        if any(earlier.key_or_group == key for earlier in self.swept):
            raise ConfigError(
                f"{text}: {key} is swept twice; give all its values in one place, as in "
                f"{key}=a,b,c",
                code="sweep.swept_twice",
            )
        if is_seeds(override) and key.rpartition(".")[2] != "seed":
            value = override.get_value_string()
            raise ConfigError(
                f"{text}: {value} is for keys that end in seed, such as RUN.seed; list the values "
                f"of {key}, or give range(0,5)",
                code="sweep.no_seed",
            )
        self.swept.append(override)

    @property
    def repeated(self) -> list[Override]:
        """The swept overrides whose listed values repeat each config: folds and seeds."""
        return [
            override
            for override in self.swept
            if is_repeated(override.key_or_group) and _is_listed(override)
        ]

    def list_configs(self) -> list[list[str]]:
        """Return the swept overrides of every config, without folds and seeds."""
        return _combine(
            [override for override in self.swept if not is_repeated(override.key_or_group)]
        )

    def list_repetitions(self) -> list[list[str]]:
        """Return the overrides of every repetition of a config; one without any if nothing is
        repeated."""
        return _combine(self.repeated)

    def list_samples(self) -> list[list[str]]:
        """Return the overrides of a few runs that together hold each swept value at least once.

        Row i holds the i-th value of each key, or its first value if it has fewer.
        """
        columns = [
            [f"{override.key_or_group}={value}" for value in _list_values(override)]
            for override in self.swept
        ]
        rows = list(zip_longest(*columns)) or [()]
        return [
            [*self.fixed, *(value or column[0] for value, column in zip(row, columns, strict=True))]
            for row in rows
        ]

    def list_combinations(self) -> list[list[str]]:
        """Return the swept overrides of every run, in the order of Hydra; equal values such as 0.1
        and 1e-1 count once.

        Raises:
            ConfigError: a key has an interval of values (`sweep.interval`).
        """
        for override in self.swept:
            if not override.is_discrete_sweep():
                raise ConfigError(
                    f"{override.input_line}: only a sampler can choose from an interval; add "
                    f"{SWEEPER_KEY}=optuna, or list the values",
                    code="sweep.interval",
                )
        return _combine(self.swept)

    def list_sweeper_arguments(self) -> list[str]:
        """Return the arguments for another sweeper of Hydra; keys that are not in its config are
        added."""
        swept = []
        for override in self.swept:
            name = override.key_or_group
            if "." not in name and "/" not in name:
                name = f"{GROUP}{name}"
            # "++" adds or replaces: Hydra composes an empty config, which has none of our keys
            values = override.get_value_string()
            if is_seeds(override):  # no function of Hydra
                values = ",".join(override.sweep_string_iterator())
            swept.append(f"++{name}={values}")
        parameters = [str(override.input_line) for override in self.sweeper_words]
        return [f"{SWEEPER_KEY}={self.sweeper}", *parameters, *swept]

    def resolve_folder(self) -> str:
        """Return the sweep folder with `${now:%Y}` and other resolvers applied."""
        if self.given_folder is None:
            # Without the number of seeds: more seeds later add runs to the same sweep.
            swept = [
                f"{override.key_or_group}=seeds" if is_seeds(override) else str(override.input_line)
                for override in self.swept
            ]
            words = [*self.fixed, *swept]
            return f"runs/sweep-{hash_overrides(words)}"
        setup_globals()  # registers Hydra's resolvers
        try:
            return str(OmegaConf.create({"folder": self.given_folder}).folder)
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{FOLDER_KEY}={self.given_folder}: {str(error).splitlines()[0]}"
            ) from error


def is_repeated(key: str) -> bool:
    """Check whether the values of a key repeat a config: folds and seeds."""
    return key.rpartition(".")[2] in REPEATED


def hash_overrides(overrides: Sequence[str]) -> str:
    """Return a hash of 8 hex digits of a set of overrides, independent of their order."""
    # Sorted, so that the same values in another order find their run folder again; not `hash`,
    # which differs between processes.
    return blake2b("\n".join(sorted(overrides)).encode(), digest_size=4).hexdigest()


def split_words(words: Sequence[str]) -> dict[str, str]:
    """Return key -> value of overrides `key=value`."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def strip_prefixes(words: Sequence[str]) -> list[str]:
    """Return the overrides of a run, given those with which Hydra has launched it."""
    return [word.removeprefix("++").removeprefix(GROUP) for word in words]


def _check_installed(launcher: str) -> None:
    if launcher not in LAUNCHERS:
        return
    package, library, extra = LAUNCHERS[launcher]
    try:
        # found and not imported: a launcher may take seconds to import, in each process
        is_installed = (
            find_spec(f"hydra_plugins.{package}") is not None and find_spec(library) is not None
        )
    except ModuleNotFoundError:  # no package hydra_plugins at all
        is_installed = False
    if not is_installed:
        raise ConfigError(
            f"{LAUNCHER_KEY} = {launcher}: it is not installed; install it with "
            f'`pip install "phasetrain[{extra}]"`',
            code="install.missing",
        )


def _combine(overrides: Sequence[Override]) -> list[list[str]]:
    """Return every combination of the values of some overrides, the last key first."""
    columns = [
        [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
        for override in overrides
    ]
    return [list(row) for row in product(*map(_drop_equal_values, columns))]


def _is_listed(override: Override) -> bool:
    """Return whether the values can be listed: not an interval, nor random values."""
    return bool(override.is_discrete_sweep())


def _drop_equal_values(words: Sequence[str]) -> list[str]:
    """Return the first override of each value."""
    parser = make_override_parser()
    # By repr: 1 and 1.0 and true are equal keys of a dict, and different values of a config.
    first_words = dict[str, str]()
    for word in words:
        first_words.setdefault(repr(parser.parse_override(word).value()), word)
    return list(first_words.values())


def _list_values(override: Override) -> list[str]:
    value = override.value()
    if isinstance(value, IntervalSweep):
        # A sampler draws from the interval: its ends represent the values between for the check.
        return [str(value.start), str(value.end)]
    return list(override.sweep_string_iterator())
