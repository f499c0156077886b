"""Options of the commands for experiments; no module here imports torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phasetrain.cli.options import option
from phasetrain.cli.parsing import TRUST
from phasetrain.errors import ConfigError


@dataclass(frozen=True)
class CertifyOptions:
    """How to certify.

    Attributes:
        launch: runs the order in a file, writes the output to another, and returns the exit code;
            None: in new processes.
    """

    out: str = option(
        "certificate.json",
        "certificate to write (default: certificate.json)",
        metavar="FILE",
    )
    is_quick: bool = option(
        False,
        "one kill, with the configured setting of MACHINE.deterministic only",
        flag="--quick",
    )
    is_strict: bool = option(
        False,
        "exit code 7 also if values of the parts have not changed, which proves nothing about them",
        flag="--strict",
    )
    launch: Callable[[Path, Path], int] | None = None


@dataclass(frozen=True)
class RecordOptions:
    """How to record a golden run.

    Attributes:
        launch: as in `CertifyOptions`.

    Raises:
        ConfigError: a value is out of range (code `golden.out_of_range`).
    """

    out: str = option(
        "golden.json",
        "file to write, or to add this platform to (default: golden.json)",
        metavar="FILE",
    )
    updates: int | None = option(None, "number of updates (default: 6 in two epochs)", metavar="N")
    launch: Callable[[Path, Path], int] | None = None

    def __post_init__(self) -> None:
        if self.updates is not None and self.updates < 1:
            raise ConfigError(
                f"--updates {self.updates}: expected at least 1", code="golden.out_of_range"
            )


@dataclass(frozen=True)
class VerifyOptions:
    """How to verify.

    Raises:
        ConfigError: a value is out of range (code `verify.out_of_range`).
    """

    fraction: float = option(0.05, "share of the updates to train again (default: 0.05)")
    segments: int | None = option(None, "number of segments between kept checkpoints", metavar="N")
    seed: int | None = option(
        None, "of the choice of segments (default: unpredictable)", metavar="N"
    )
    run: str = option(
        "",
        "run that the weights are from (default: the run folder that contains them)",
        metavar="RUN_FOLDER",
    )
    trust: bool = option(False, TRUST)

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"--fraction {self.fraction:g}: expected a share of the updates above 0 and up to "
                "1, such as 0.05",
                code="verify.out_of_range",
            )
        if self.segments is not None and self.segments < 1:
            raise ConfigError(
                f"--segments {self.segments}: expected at least 1", code="verify.out_of_range"
            )


@dataclass(frozen=True)
class JudgeOptions:
    """How to judge."""

    revisions: tuple[str, ...] = option(
        (),
        "judge revisions of your project, the first one is the baseline; with a single one "
        "the candidate is the working tree. The words are then the command that is run in each",
        flag="--rev",
        metavar="REVISION",
    )
    metric: str = option("", "such as test/accuracy, or -test/loss if smaller is better")
    which: Literal["last", "best"] = option(
        "last", "value of each run: last or best", flag="--value"
    )
    short: int = option(
        20, "updates that are compared bit by bit first (default: 20; 0: none)", metavar="N"
    )
    is_full: bool = option(
        False, "compare whole runs bit by bit if the first updates are", flag="--full"
    )
    margin: float | None = option(
        None, "smallest difference of the metric that matters", flag="--d", metavar="D"
    )
    error_rate: float = option(
        0.05, "probability of any false verdict (default: 0.05)", metavar="P"
    )
    most_pairs: int = option(12, "most pairs of runs (default: 12)", flag="--pairs", metavar="N")
    is_fresh: bool = option(False, "use only runs that judge has trained itself", flag="--fresh")
    trust: bool = option(False, TRUST)
    config_dir: str | None = option(None, "folder with your configs", metavar="DIR")

    def check(self) -> None:
        """Reject values that make no sense.

        Raises:
            ConfigError: names the first one (code `cli.usage`).
        """
        problems = {
            "--short": (self.short < 0, self.short, "0 or more"),
            "--pairs": (self.most_pairs < 1, self.most_pairs, "1 or more"),
            "--error-rate": (not 0 < self.error_rate < 1, self.error_rate, "between 0 and 1"),
            "--d": (self.margin is not None and not self.margin > 0, self.margin, "above 0"),
        }
        for flag, (is_wrong, value, expected) in problems.items():
            if is_wrong:
                raise ConfigError(f"{flag} {value}: expected a number {expected}", code="cli.usage")


@dataclass(frozen=True)
class BisectOptions:
    """How to bisect.

    Raises:
        ConfigError: a value is out of range (code `cli.usage`).
    """

    range: str = option(
        "",
        "find the first commit after A, up to B, that makes the difference; the words are then the "
        "command that is run in each commit",
        flag="--rev",
        metavar="A..B",
    )
    metric: str = option("", "such as test/accuracy, or -test/loss if smaller is better")
    is_bits: bool = option(
        False, "decide by bits alone, and train no whole runs for a metric", flag="--bits"
    )
    short: int = option(20, "updates of a short run (default: 20)", metavar="N")
    is_full: bool = option(False, "compare whole runs instead of short ones", flag="--full")
    error_rate: float = option(
        0.01, "probability that a verdict by the metric is false (default: 0.01)", metavar="P"
    )
    most_pairs: int = option(
        12, "most pairs of runs for a verdict (default: 12)", flag="--pairs", metavar="N"
    )
    trust: bool = option(False, TRUST)
    config_dir: str | None = option(None, "folder with your configs", metavar="DIR")

    def __post_init__(self) -> None:
        problems = {
            "--short": (self.short < 1, self.short, "1 or more"),
            "--pairs": (self.most_pairs < 3, self.most_pairs, "3 or more"),
            "--error-rate": (not 0 < self.error_rate < 1, self.error_rate, "between 0 and 1"),
        }
        for flag, (is_wrong, value, expected) in problems.items():
            if is_wrong:
                raise ConfigError(f"{flag} {value}: expected a number {expected}", code="cli.usage")


@dataclass(frozen=True)
class Question:
    """The change of a run that `rerun` is asked about."""

    without: tuple[str, ...] = option(
        (),
        "what if: leave samples out; a file of ids, or ids such as 3,17",
        metavar="IDS",
    )
    settings: tuple[str, ...] = option(
        (),
        "what if: change a key that a stage may change, see --from-update",
        flag="--set",
        metavar="KEY=VALUE",
    )
    from_update: int | None = option(None, "first update with the keys of --set", metavar="K")
    keep_until: int | None = option(None, "train all updates after update K again", metavar="K")


@dataclass(frozen=True)
class ComparisonSettings:
    """How configs are compared that folds or seeds repeat."""

    baseline: tuple[str, ...] = option(
        (),
        "the config that the others are compared with, instead of the best one; again for "
        "every swept key that tells it from others",
        metavar="SECTION.key=VALUE",
    )
    detect: float | None = option(
        None,
        "show how many seeds find a difference of this size in the metric",
        metavar="DIFFERENCE",
    )


@dataclass(frozen=True)
class AtOptions:
    """How to visit a past update.

    Raises:
        ConfigError: a value is out of range (code `cli.usage`).
    """

    script: str | None = option(None, "run Python code instead of a prompt", metavar="FILE")
    notebook: str | None = option(
        None, "write a Jupyter notebook that restores the state, and open no prompt", metavar="FILE"
    )
    memory: float = option(
        1.0, "GiB of states kept in memory, for back() and goto() (default: 1)", metavar="GIB"
    )
    trust: bool = option(False, TRUST)

    def __post_init__(self) -> None:
        if not self.memory >= 0:
            raise ConfigError(f"--memory {self.memory}: expected 0 or more GiB", code="cli.usage")
        if self.script is not None and self.notebook is not None:
            raise ConfigError(
                "phasetrain at: expected --script or --notebook, not both", code="cli.usage"
            )


@dataclass(frozen=True)
class OrderOptions:
    """A question about the order of the samples.

    Raises:
        ConfigError: there is no question (code `cli.usage`).
    """

    sample: int | None = option(None, "all updates with a sample of the dataset", metavar="ID")
    update: int | None = option(None, "all samples of an update", metavar="N")
    between: tuple[int, int] | None = option(
        None, "all samples of a range of updates", type=int, nargs=2, metavar=("A", "B")
    )
    sql: str | None = option(
        None,
        "query the tables `samples` and `updates`, of all updates or of --between",
        metavar="SELECT",
    )
    out: str | None = option(None, "write all rows to FILE.csv or FILE.parquet", metavar="FILE")
    trust: bool = option(False, TRUST)

    def __post_init__(self) -> None:
        asked = [self.sample is not None, self.update is not None]
        if sum(asked) + bool(self.between or self.sql) != 1:
            raise ConfigError(
                "phasetrain order: expected one of --sample ID, --update N, --between A B and "
                "--sql SELECT; --sql and --between go together",
                code="cli.usage",
            )


@dataclass(frozen=True)
class RelogOptions:
    """Options of logging after the fact.

    Raises:
        ConfigError: a value is out of range (code `cli.usage`).
    """

    hook: str = option(
        "", "file with hooks; without one, relog writes what your changed code logs", metavar="FILE"
    )
    updates: str = option(":", "the updates, such as 100:200 (default: all)", metavar="A:B")
    jobs: int = option(
        1, "maximum number of processes, each from a kept checkpoint (default: 1)", metavar="N"
    )
    every: int | None = option(
        None, "updates between two logged steps (default: as in the run)", metavar="N"
    )
    trust: bool = option(False, TRUST)

    def __post_init__(self) -> None:
        for flag, value in (("--jobs", self.jobs), ("--every", self.every)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: expected 1 or more", code="cli.usage")


@dataclass(frozen=True)
class WhyOptions:
    """Which spike to explain, and at which cost.

    Raises:
        ConfigError: a value is out of range (code `cli.usage`).
    """

    update: int | None = option(None, "the update whose loss to explain", metavar="U")
    spike: bool = option(False, "explain the highest spike of the training loss (default)")
    metric: str = option(
        "", "explain the largest jump of a metric, such as test/loss", metavar="SPLIT/METRIC"
    )
    budget: float = option(
        0.1, "updates to train at most, as a share of the run (default: 0.1)", metavar="SHARE"
    )
    trust: bool = option(False, TRUST)

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ConfigError(
                f"--budget {self.budget:g}: expected a share of the updates of the run above 0, "
                "such as 0.1",
                code="cli.usage",
            )
