"""`-m`: one run for each combination of the values given, or for each that a sampler asks for.

Hydra does what it is good at, the product of the values and the launching, so that any of its
sweepers and launchers serves (`hydra/launcher=joblib`). What is trained it never sees: each job
starts the program again as a process of its own, with its own overrides and its own run folder.
"""

import fcntl
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import hydra
from omegaconf import OmegaConf

from phasetrain.commands.setup import first_monitor
from phasetrain.commands.sweep.jobs import NUMBER_KEY, Job, handled, records
from phasetrain.commands.sweep.output import show
from phasetrain.commands.sweep.override_text import FOLDER_KEY, Words, digest, quoted
from phasetrain.commands.sweep.results import Results
from phasetrain.commands.sweep.study import Trials
from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.runtime.live_view import LastingStream
from phasetrain.runtime.terminal import Terminal

__all__ = ["COMMAND", "Results", "digest", "sweep"]

COMMAND = (sys.executable, "-m", "phasetrain")

LOCK = ".sweep.lock"
"""In the sweep folder; the kernel lets go of it when the process ends, whatever ends it."""

Check = Callable[[Sequence[str]], AttrDict | None]
"""Raises what is wrong with the overrides of a run, and returns its config."""


def sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    *,
    check: Check,
    command: Sequence[str] = COMMAND,
    terminal: Terminal | None = None,
) -> int:
    """Run every combination of the swept values, each in
    `{sweep folder}/{digest of its overrides}`.

    The sweep folder is `hydra.sweep.dir`, by default `runs/sweep-{digest of all overrides}`: the
    same command again resumes what was interrupted and passes over what is finished. Each job
    leaves `{digest}.json` beside its run folder, with its overrides and its exit code; at the end
    stand a table, `results.json`, `results.csv` and `sweep.html`.

    Args:
        overrides: as on the command line; `key=a,b`, `choice(...)` and `range(...)` are swept,
            those that begin with `hydra` go to Hydra.
        config_dir: passed on to each job.
        check: called before any job starts with the overrides of single runs, which together hold
            each value once; raises what is wrong with them, and returns the config.
        command: what starts a job; `--config-dir`, overrides and `RUN.dir=...` are appended.
        terminal: where the table is printed; standard output by default.

    Returns:
        0 when all jobs ended well, 128 + n after signal n, else 1; failed jobs are named on
        standard error.

    Raises:
        ConfigError: `RUN.dir` is given, which all jobs would share, or a value is asked for by
            `glob(...)`.
    """
    words = Words.read(overrides)
    configs = [check(one) for one in words.samples()]
    grid = words.combinations() if words.sweeper == "basic" else []
    job = Job(
        command=(*command, *(() if config_dir is None else ("--config-dir", str(config_dir)))),
        fixed=tuple(words.fixed),
        folder=_made(words.folder()),
        sweep=uuid4().hex,
        monitor=_monitor(configs[0]),
    )
    monitor = job.monitor
    with _alone(job.folder):
        with handled(lambda number, frame: job.stop.ask(number)):
            if words.sweeper == "basic":
                code = _run_all(job, words, grid, check)
            elif words.sweeper == "optuna":
                trials = Trials(words, job, partial(_launch, job, words))
                code = trials.run()
                monitor = trials.monitor
            else:
                code = _hydra(job, [*words.hydra, *words.arguments()])
        if code and not records(job.folder):  # Hydra has said why
            return ConfigError.exit_code
        planned = {digest([*words.fixed, *swept]): swept for swept in grid}
        results = Results.read(job.folder, monitor, planned, sweep=job.sweep)
        show(results, terminal or Terminal())
        return _ended(job, code)


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Hold the sweep folder; one in which nothing was done is taken away."""
    path = Path(folder, LOCK)
    with path.open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FolderInUseError(
                f"{FOLDER_KEY} = {folder!r} is in use by another sweep; wait for it to end, or give this one a folder "
                "of its own"
            ) from error
        try:
            yield
        finally:
            if [one.name for one in path.parent.iterdir()] == [LOCK]:
                path.unlink()
                path.parent.rmdir()


def _run_all(job: Job, words: Words, grid: Sequence[Sequence[str]], check: Check) -> int:
    """Run all combinations but those that have finished."""
    left: list[tuple[int, Sequence[str]]] = []
    for number, swept in enumerate(grid):
        record = job.record(swept)
        composed = partial(check, [*record.overrides, f"RUN.dir={quoted(record.folder)}"])
        if _finished(record.folder, composed):
            replace(record, exit_code=0, passed_over=True).write(job.folder)
        else:
            left.append((number + 1, swept))
    if left:
        return _launch(job, words, left, total=len(grid))
    return 0


def _launch(
    job: Job, words: Words, runs: Sequence[tuple[int, Sequence[str]]], total: int = 0
) -> int:
    """Have a launcher of Hydra start some runs, and return 0 unless it could not."""
    batch = tuple((number, tuple(swept)) for number, swept in runs)
    number = ",".join(str(place) for place in range(len(batch)))
    return _hydra(replace(job, batch=batch, total=total), [*words.hydra, f"+{NUMBER_KEY}={number}"])


def _ended(job: Job, code: int) -> int:
    """Name what has failed, and return the exit code of the sweep."""
    own = [one for one in records(job.folder) if one.sweep == job.sweep]
    failed = [one for one in own if one.exit_code != 0]
    asked = job.stop.asked()  # the terminal may have been closed
    stderr = LastingStream(sys.stderr)
    job.stop.forget()
    if asked:
        stderr.write(f"stopped by {signal.Signals(asked).name}; the same command goes on\n")
        return 128 + asked
    for one in failed:
        if one.exit_code is None:
            code_told = "its end was not seen"
        else:
            code_told = f"exit code {one.exit_code}"
        stderr.write(f"{code_told}: {' '.join(one.overrides)} in {one.folder}\n")
    return code or int(bool(failed))


def _hydra(job: Job, words: Sequence[str]) -> int:
    """Start Hydra, and return its exit code."""
    arguments = [
        f"{FOLDER_KEY}={quoted(job.folder)}",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        *words,
    ]
    before = sys.argv
    sys.argv = [before[0], "--multirun", *arguments]  # hydra.main has no other door
    try:
        hydra.main(version_base="1.3", config_path=None)(job)()
        job.stop.wait()
    except SystemExit as ended:
        job.stop.wait()
        if isinstance(ended.code, int):
            return ended.code
        return 1
    finally:
        sys.argv = before
    return 0


def _made(folder: str) -> str:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{FOLDER_KEY} = {folder!r} cannot be made: {error.strerror}; give a folder that can be written"
        ) from error
    return folder


def _finished(folder: str, composed: Callable[[], AttrDict | None]) -> bool:
    """Tell whether a folder holds a run that has finished with the config that it would be started
    with again."""
    try:
        status = json.loads(Path(folder, "status.json").read_bytes())
        written = Path(folder, "config.yaml").read_text("utf-8")
    except (OSError, ValueError):
        return False
    if not isinstance(status, dict) or status.get("state") != "finished":
        return False
    config = composed()
    return config is not None and written == OmegaConf.to_yaml(OmegaConf.create(config.plain()))


def _monitor(config: AttrDict | None) -> str:
    """Return by which metric the runs are compared: CHECKPOINT.best.monitor, or the first metric of
    the first test."""
    if config is None:
        return ""
    if config.CHECKPOINT.best.monitor is not None:
        return str(config.CHECKPOINT.best.monitor)
    with suppress(ConfigError):
        return first_monitor(config)
    return ""
