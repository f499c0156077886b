"""`-m`: one run per combination of the values given (section of the command line, not of the config).

Hydra does what it is good at, the product of the values and the launching, so that any of its sweeper and launcher
plugins serves: `hydra/launcher=joblib`. What is trained it never sees: each job starts the program again as a
process of its own, with its own overrides and its own run folder.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from phasetrain.errors import ConfigError

COMMAND = (sys.executable, "-m", "phasetrain")

# A group (`LOSS=a,b`) and a key below it (`LOSS.gamma=1,2`) cannot both be keys of the one config Hydra makes.
_GROUP = "select."


def sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    *,
    check: Callable[[Sequence[str]], None],
    command: Sequence[str] = COMMAND,
) -> int:
    """Run every combination of the swept values, each in `{sweep folder}/{digest of its overrides}`.

    The sweep folder is `hydra.sweep.dir`, by default `runs/sweep-{digest of all overrides}`: the same command again
    resumes what was interrupted and passes over what is finished. Each job leaves `{digest}.json` there, with its
    overrides and its exit code.

    Args:
        overrides: as on the command line; `key=a,b`, `choice(...)` and `range(...)` are swept, those that begin with
            `hydra` go to Hydra.
        config_dir: passed on to each job.
        check: called, before any job starts, with overrides of single runs that together hold each value once;
            raises what is wrong with them.
        command: what starts a job; `--config-dir`, overrides and `RUN.dir=...` are appended.

    Returns:
        0 when all jobs ended well, else 1; failed jobs are named on stderr.

    Raises:
        ConfigError: `RUN.dir` is given, which all jobs would share, or values are given by `glob(...)`.
    """
    parts = _split(overrides)
    for combination in _samples(parts):
        check(combination)
    folder = f"runs/sweep-{_digest([*parts.fixed, *(str(o.input_line) for o in parts.swept)])}"
    extra = () if config_dir is None else ("--config-dir", str(config_dir))
    job = Job(command=(*command, *extra), fixed=tuple(parts.fixed), sweep=uuid4().hex)
    arguments = [
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        *parts.hydra,
        *(f"++{_key(override)}={override.get_value_string()}" for override in parts.swept),
    ]
    started = _Started(job)
    try:
        with _arguments(["phasetrain", "--multirun", *arguments]):
            hydra.main(version_base="1.3", config_path=None)(started)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 1


@dataclass(frozen=True)
class Job:
    """What Hydra's launcher calls for each combination, on whatever machine it chose.

    Attributes:
        command: what starts the program.
        fixed: overrides that all jobs share.
        sweep: identity of this call of `sweep`.
    """

    command: tuple[str, ...]
    fixed: tuple[str, ...]
    sweep: str

    def __call__(self, _config: Any) -> int:
        """Run one combination to its end; return its exit code."""
        ...
        return 0
