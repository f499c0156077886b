"""`-m`: one run for each combination of the values given.

Hydra does what it is good at, the product of the values and the launching, so that any of its sweepers and
launchers serves (`hydra/launcher=joblib`). What is trained it never sees: each job starts the program again as a
process of its own, with its own overrides and its own run folder.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phasetrain.errors import ConfigError

COMMAND = (sys.executable, "-m", "phasetrain")
FOLDER_KEY = "hydra.sweep.dir"

# In the one config that Hydra makes of swept keys, a group (`LOSS=a,b`) and a key below it (`LOSS.gamma=1,2`)
# cannot both be called LOSS.
_GROUP = "select."


def sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    *,
    check: Callable[[Sequence[str]], object],
    command: Sequence[str] = COMMAND,
) -> int:
    """Run every combination of the swept values, each in `{sweep folder}/{digest of its overrides}`.

    The sweep folder is `hydra.sweep.dir`, by default `runs/sweep-{digest of all overrides}`: the same command again
    resumes what was interrupted and passes over what is finished. Each job leaves `{digest}.json` beside its run
    folder, with its overrides and its exit code.

    Args:
        overrides: as on the command line; `key=a,b`, `choice(...)` and `range(...)` are swept, those that begin with
            `hydra` go to Hydra.
        config_dir: passed on to each job.
        check: called before any job starts with the overrides of single runs, which together hold each value once;
            raises what is wrong with them.
        command: what starts a job; `--config-dir`, overrides and `RUN.dir=...` are appended.

    Returns:
        0 when all jobs ended well, 128 + n after signal n, else 1; failed jobs are named on standard error.

    Raises:
        ConfigError: `RUN.dir` is given, which all jobs would share, or a value is asked for by `glob(...)`.
    """
    words = _Words.read(overrides)
    for one in words.samples():
        check(one)
    job = Job(
        command=(*command, *(() if config_dir is None else ("--config-dir", str(config_dir)))),
        fixed=tuple(words.fixed),
        folder=words.folder(),
        sweep=uuid4().hex,
    )
    code = _launch(job, words)
    failed = [result for result in _results(job) if result["exit_code"] != 0]
    for result in failed:
        sys.stderr.write(f"exit code {result['exit_code']}: {' '.join(result['overrides'])} in {result['folder']}\n")
    return 1 if failed and code < 128 else code


@dataclass(frozen=True)
class Job:
    """What a launcher of Hydra calls once per combination, on whatever machine it chose.

    Attributes:
        command: what starts the program.
        fixed: overrides that all combinations share.
        folder: the sweep folder.
        sweep: identity of this call of `sweep`, so that results of an earlier one are not taken for its own.
    """

    command: tuple[str, ...]
    fixed: tuple[str, ...]
    folder: str
    sweep: str

    def __call__(self, config: Any) -> int:
        """Run one combination to its end and return its exit code.

        Raises:
            SystemExit: a signal asked the sweep to end; the job was let finish, no other is to start.
        """
        swept = [word.removeprefix("++").removeprefix(_GROUP) for word in HydraConfig.get().overrides.task]
        overrides = [*self.fixed, *swept]
        name = digest(overrides)
        run_folder = f"{self.folder}/{name}"
        code, stopped_by = _run([*self.command, *overrides, f"RUN.dir={_quoted(run_folder)}"])
        result = {"sweep": self.sweep, "overrides": overrides, "folder": run_folder, "exit_code": code}
        Path(self.folder, f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if stopped_by is not None:
            raise SystemExit(128 + stopped_by)
        return code


def digest(overrides: Sequence[str]) -> str:
    """Return 8 hex digits that stand for a set of overrides, in any order."""
    return blake2b("\n".join(sorted(overrides)).encode(), digest_size=4).hexdigest()


@dataclass
class _Words:
    """The words of the command line: what all jobs share, what is swept, what is for Hydra."""

    fixed: list[str] = field(default_factory=list)
    swept: list[Override] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    given_folder: str | None = None

    @classmethod
    def read(cls, overrides: Sequence[str]) -> "_Words":
        words, parser = cls(), OverridesParser.create()
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
            raise ConfigError(f"{text}: all runs of a sweep would share this folder; give {FOLDER_KEY}=FOLDER instead")
        if key == FOLDER_KEY:
            self.given_folder = str(override.value())
        elif override.is_hydra_override():
            self.hydra.append(text)
        elif not override.is_sweep_override():
            self.fixed.append(text)
        elif override.value_type is not None and override.value_type.name == "GLOB_CHOICE_SWEEP":
            raise ConfigError(f"{text}: glob() is not understood here; list the values, as in {key}=a,b")
        else:
            self.swept.append(override)

    def samples(self) -> list[list[str]]:
        """Return overrides of as few runs as hold each value once: the first values, the second ones, ..."""
        columns = [[f"{o.key_or_group}={value}" for value in _values(o)] for o in self.swept]
        rows = list(zip_longest(*columns)) or [()]
        return [[*self.fixed, *(v or c[0] for v, c in zip(row, columns, strict=True))] for row in rows]

    def arguments(self) -> list[str]:
        """Return the swept words as Hydra takes keys that it does not know."""
        names = [o.key_or_group for o in self.swept]
        prefixed = [name if "." in name or "/" in name else f"{_GROUP}{name}" for name in names]
        return [f"++{name}={o.get_value_string()}" for name, o in zip(prefixed, self.swept, strict=True)]

    def folder(self) -> str:
        """Return the sweep folder, `${now:%Y}` and the like resolved."""
        if self.given_folder is None:
            return f"runs/sweep-{digest([*self.fixed, *(str(o.input_line) for o in self.swept)])}"
        setup_globals()  # Hydra's resolvers
        try:
            return str(OmegaConf.create({"folder": self.given_folder}).folder)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{FOLDER_KEY}={self.given_folder}: {str(error).splitlines()[0]}") from error


def _values(override: Override) -> list[str]:
    value = override.value()
    if isinstance(value, IntervalSweep):  # for sweepers that draw from it; its ends stand for what lies between
        return [str(value.start), str(value.end)]
    return list(override.sweep_string_iterator())


def _launch(job: Job, words: _Words) -> int:
    arguments = [
        f"{FOLDER_KEY}={_quoted(job.folder)}",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        *words.hydra,
        *words.arguments(),
    ]
    before = sys.argv
    sys.argv = [before[0], "--multirun", *arguments]  # hydra.main has no other door
    try:
        hydra.main(version_base="1.3", config_path=None)(job)()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.argv = before
    return 0


def _results(job: Job) -> Iterator[dict[str, Any]]:
    for path in sorted(Path(job.folder).glob("*.json")):
        result = json.loads(path.read_text("utf-8"))
        if result["sweep"] == job.sweep:
            yield result


def _run(command: Sequence[str]) -> tuple[int, int | None]:
    """Return the exit code of a command, as a shell gives it, and the signal that came meanwhile, if one did."""
    received: list[int] = []
    process = subprocess.Popen(command)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGTERM:  # of SIGINT, a terminal gives the process one of its own
            process.send_signal(number)

    with _handled(on_signal):
        code = process.wait()
    return (code if code >= 0 else 128 - code), (received[0] if received else None)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()
