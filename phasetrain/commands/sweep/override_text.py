"""The command line of a sweep: what all runs share, what is swept, and what is for Hydra."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from itertools import product, zip_longest
from types import MappingProxyType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phasetrain.errors import ConfigError

FOLDER_KEY = "hydra.sweep.dir"

SWEEPER_KEY = "hydra/sweeper"
WHERE = "hydra.sweeper"

LAUNCHER_KEY = "hydra/launcher"

LAUNCHERS = MappingProxyType(
    {
        "joblib": ("hydra_joblib_launcher", "joblib", "sweep"),
        "submitit_local": ("hydra_submitit_launcher", "submitit", "cluster"),
        "submitit_slurm": ("hydra_submitit_launcher", "submitit", "cluster"),
    }
)
"""Launcher -> its package below hydra_plugins, the library that it needs, and the extra that
installs both."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.-]*/[A-Za-z0-9_./-]+")

GROUP = "select."
"""Before a swept group. In the one config that Hydra makes of swept keys, a group (`LOSS=a,b`) and
a key below it (`LOSS.gamma=1,2`) cannot both be called LOSS."""


@dataclass
class Words:
    """The words of the command line.

    Attributes:
        fixed: what all runs share, as given.
        swept: what is swept.
        hydra: what is for Hydra, but for the folder.
        sweeper: what chooses the values: `basic`, all combinations; `optuna`; or another sweeper of
            Hydra.
        sweeper_words: its parameters.
    """

    fixed: list[str] = field(default_factory=list)
    swept: list[Override] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    given_folder: str | None = None
    sweeper: str = "basic"
    sweeper_words: list[Override] = field(default_factory=list)

    @classmethod
    def read(cls, overrides: Sequence[str]) -> "Words":
        """Sort the words of a command line.

        Raises:
            ConfigError: `RUN.dir` is given, which all runs would share; a value is asked for by
                `glob(...)`; or a launcher is not installed.
        """
        words = cls()
        parser = OverridesParser.create()
        for text in overrides:
            try:
                override = parser.parse_override(text)
            except HydraException:
                words.fixed.append(text)  # the check says what is wrong with it
            else:
                words._file(text, override)
        return words

    def _file(self, text: str, override: Override) -> None:
        key = override.key_or_group
        if key == "RUN.dir" and not override.is_delete():
            raise ConfigError(
                f"{text}: all runs of a sweep would share this folder; give {FOLDER_KEY}=FOLDER instead"
            )
        if key == FOLDER_KEY:
            self.given_folder = str(override.value())
        elif key == LAUNCHER_KEY:
            _check_installed(str(override.value()))
            self.hydra.append(text)
        elif key == SWEEPER_KEY:
            self.sweeper = str(override.value())
        elif key.startswith(f"{WHERE}."):
            self.sweeper_words.append(override)
        elif override.is_hydra_override():
            self.hydra.append(text)
        elif not override.is_sweep_override():
            self.fixed.append(text)
        elif override.value_type is not None and override.value_type.name == "GLOB_CHOICE_SWEEP":
            raise ConfigError(
                f"{text}: glob() is not understood here; list the values, as in {key}=a,b"
            )
        elif any(one.key_or_group == key for one in self.swept):
            raise ConfigError(
                f"{text}: {key} is swept twice; give all its values in one place, as in {key}=a,b,c"
            )
        else:
            self.swept.append(override)

    def samples(self) -> list[list[str]]:
        """Return overrides of as few runs as hold each value once: the first values, the second
        ones, ..."""
        columns = [[f"{o.key_or_group}={value}" for value in _values(o)] for o in self.swept]
        rows = list(zip_longest(*columns)) or [()]
        return [
            [*self.fixed, *(v or c[0] for v, c in zip(row, columns, strict=True))] for row in rows
        ]

    def combinations(self) -> list[list[str]]:
        """Return what is swept of every run, in the order of Hydra; equal values such as 0.1 and
        1e-1 count once.

        Raises:
            ConfigError: a range has no end of values.
        """
        for one in self.swept:
            if not one.is_discrete_sweep():
                raise ConfigError(
                    f"{one.input_line}: only a sampler can choose from an interval; add {SWEEPER_KEY}=optuna, or list "
                    "the values"
                )
        columns = [
            [f"{o.key_or_group}={value}" for value in o.sweep_string_iterator()] for o in self.swept
        ]
        return [list(row) for row in product(*map(_different, columns))]

    def arguments(self) -> list[str]:
        """Return what another sweeper of Hydra is started with; keys that it does not know are
        added."""
        names = [o.key_or_group for o in self.swept]
        prefixed = [name if "." in name or "/" in name else f"{GROUP}{name}" for name in names]
        swept = [
            f"++{name}={o.get_value_string()}" for name, o in zip(prefixed, self.swept, strict=True)
        ]
        return [
            f"{SWEEPER_KEY}={self.sweeper}",
            *(str(o.input_line) for o in self.sweeper_words),
            *swept,
        ]

    def folder(self) -> str:
        """Return the sweep folder, `${now:%Y}` and the like resolved."""
        if self.given_folder is None:
            return f"runs/sweep-{digest([*self.fixed, *(str(o.input_line) for o in self.swept)])}"
        setup_globals()  # Hydra's resolvers
        try:
            return str(OmegaConf.create({"folder": self.given_folder}).folder)
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{FOLDER_KEY}={self.given_folder}: {str(error).splitlines()[0]}"
            ) from error


def digest(overrides: Sequence[str]) -> str:
    """Return 8 hex digits that stand for a set of overrides, in any order."""
    return blake2b("\n".join(sorted(overrides)).encode(), digest_size=4).hexdigest()


def own_words(task: Sequence[str]) -> list[str]:
    """Return the words of a run as it takes them, from those by which Hydra has launched it."""
    return [word.removeprefix("++").removeprefix(GROUP) for word in task]


def quoted(text: str) -> str:
    """Return a text as a value that Hydra reads as this text; a plain path as it is."""
    if _PLAIN_PATH.fullmatch(text):
        return text
    return QuotedString(text, Quote.single).with_quotes()


def _check_installed(launcher: str) -> None:
    if launcher not in LAUNCHERS:
        return
    package, library, extra = LAUNCHERS[launcher]
    try:
        found = find_spec(f"hydra_plugins.{package}") is not None and find_spec(library) is not None
    except ModuleNotFoundError:  # there is no plugin at all
        found = False
    if not found:
        raise ConfigError(
            f'{LAUNCHER_KEY} = {launcher}: it is not installed; install it with `pip install "phasetrain[{extra}]"`'
        )


def _different(words: Sequence[str]) -> list[str]:
    """Return the first word of each value."""
    parser = OverridesParser.create()
    found = dict[str, str]()
    for word in words:
        found.setdefault(repr(parser.parse_override(word).value()), word)
    return list(found.values())


def _values(override: Override) -> list[str]:
    value = override.value()
    if isinstance(
        value, IntervalSweep
    ):  # for sweepers that draw from it; its ends stand for what lies between
        return [str(value.start), str(value.end)]
    return list(override.sweep_string_iterator())
