"""`-m`: trains one run per combination of the given values, or per suggestion of a sampler.

Hydra makes the combinations and launches the jobs, so that all of its sweepers and launchers work
(`hydra/launcher=joblib`). It never sees the training: each job starts the program again as a
separate process, with its own overrides and run folder.
"""

import fcntl
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import hydra
from omegaconf import OmegaConf

from phasetrain.addons.experiments.options import ComparisonSettings
from phasetrain.addons.experiments.sweep.groups import check_comparison
from phasetrain.addons.experiments.sweep.jobs import NUMBER_KEY, Job, read_job_records
from phasetrain.addons.experiments.sweep.output import show_results
from phasetrain.addons.experiments.sweep.override_text import (
    FOLDER_KEY,
    PRUNE_KEY,
    SWEEPER_KEY,
    SweepOverrides,
    hash_overrides,
)
from phasetrain.addons.experiments.sweep.prune.pruned_sweep import PrunedSweep
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.addons.experiments.sweep.prune.trial_plan import plan_trial
from phasetrain.addons.experiments.sweep.results import Results
from phasetrain.addons.experiments.sweep.shared_prefixes import SharedPrefixes
from phasetrain.addons.experiments.sweep.study import StudySettings, Trials
from phasetrain.app.setup import find_first_metric
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.compose.override_text import quote_value
from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.runs.view import RunView
from phasetrain.runtime.child_processes import COMMAND, handle_signals
from phasetrain.runtime.live_view import LastingStream
from phasetrain.runtime.terminal import Terminal

__all__ = ["COMMAND", "ComparisonSettings", "Results", "hash_overrides", "sweep"]

LOCK = ".sweep.lock"
"""Lock file in the sweep folder; the kernel releases the lock when the process ends, even if it is
killed."""

Check = Callable[[Sequence[str]], AttrDict | None]
"""Validates the overrides of a run: raises their mistakes, and returns the config."""


def sweep(
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    *,
    check: Check,
    command: Sequence[str] = COMMAND,
    terminal: Terminal | None = None,
    comparison: ComparisonSettings | None = None,
    plan_only: bool = False,
) -> int:
    """Train every combination of the swept values, each in `{sweep folder}/{hash of overrides}`.

    The sweep folder is `hydra.sweep.dir`, by default `runs/sweep-{hash of all overrides}`:
    re-running the command resumes interrupted runs and skips finished ones. Each job writes
    `{hash}.json` next to its run folder, with its overrides and its exit code; at the end there are
    a table, `results.json`, `results.csv` and `sweep.html`.

    Args:
        overrides: as on the command line; `key=a,b`, `choice(...)` and `range(...)` are swept,
            overrides that begin with `hydra` are for Hydra.
        config_dir: folder with the user's configs, passed on to each job.
        check: called before any job starts, with the overrides of a few runs that together hold
            each value at least once.
        command: command line that starts a job; `--config-dir`, overrides and `RUN.dir=...` are
            appended.
        terminal: where the table is printed; standard output by default.
        comparison: how configs are compared that folds or seeds repeat.
        plan_only: print the updates that runs share, and start nothing.

    Returns:
        0 if all jobs succeeded, 128 + n after signal n, else 1; failed jobs are listed on standard
        error.

    Raises:
        ConfigError: `RUN.dir` is given, which all jobs would share, values are given by
            `glob(...)`, or the baseline is not a config of the sweep.
    """
    words = SweepOverrides.read(overrides)
    prune = PruneSettings.read(words.prune_words)
    _check_sweeper(words, prune)
    comparison = comparison or ComparisonSettings()
    check_comparison(comparison, words)
    configs = [check(sample) for sample in words.list_samples()]
    grid: list[list[str]] = []
    if words.sweeper == "basic":
        grid = words.list_combinations()
    if config_dir is not None:
        command = [*command, "--config-dir", str(config_dir)]
    job = Job(
        command=tuple(command),
        fixed=tuple(words.fixed),
        folder=_make_folder(words.resolve_folder()),
        sweep=uuid4().hex,  # of this call, because a pid may be used again by the next one
        monitor=_choose_monitor(configs[0]),
    )
    monitor = job.monitor
    terminal = terminal or Terminal()
    prefixes = None
    if prune is None and (plan_only or _reuses_prefixes(configs[0])):
        prefixes = _plan_prefixes(job, words, grid, config_dir, terminal)
    if plan_only:
        return _end_plan(job.folder, words, is_planned=prefixes is not None)
    with _lock_folder(job.folder):
        with handle_signals(lambda number, frame: job.stop.send(number)):
            if prune is not None:
                monitor = _choose_pruning_monitor(words, job)
                make_plan = partial(plan_trial, config_dir=config_dir)
                launch = partial(_launch_paused, job, words)
                pruned = PrunedSweep(job, prune, monitor, make_plan, launch, terminal.say)
                code = _run_pruned(pruned, words, grid)
            elif words.sweeper == "basic":
                code = _run_grid(job, words, grid, check, prefixes)
            elif words.sweeper == "optuna":
                trials = Trials(words, job, partial(_launch_runs, job, words))
                code = trials.run()
                monitor = trials.monitor
            else:
                code = _run_hydra(job, [*words.hydra, *words.list_sweeper_arguments()])
        if code and not read_job_records(job.folder):  # Hydra has printed the reason
            return ConfigError.exit_code
        planned = {hash_overrides([*words.fixed, *swept]): swept for swept in grid}
        results = Results.read(
            job.folder,
            monitor,
            planned,
            sweep=job.sweep,
            comparison=comparison,
        )
        show_results(results, terminal)
        return _report_failures(job, code)


@contextmanager
def _lock_folder(folder: str) -> Iterator[None]:
    """Hold the lock of the sweep folder; a folder that stays empty is removed."""
    path = Path(folder, LOCK)
    with path.open("ab") as file:
        # A kernel lock, because a lock by existence would outlive a killed sweep.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FolderInUseError(
                f"{FOLDER_KEY} = {folder!r} is in use by another sweep; wait for it to end, or "
                "choose another folder"
            ) from error
        try:
            yield
        finally:
            # a mistake in an override has created the folder and nothing else
            if [entry.name for entry in path.parent.iterdir()] == [LOCK]:
                path.unlink()
                path.parent.rmdir()


def _run_grid(
    job: Job,
    words: SweepOverrides,
    grid: Sequence[Sequence[str]],
    check: Check,
    prefixes: SharedPrefixes | None,
) -> int:
    """Run all combinations, except finished ones."""
    left: list[tuple[int, Sequence[str]]] = []
    for number, swept in enumerate(grid, start=1):
        record = job.make_record(swept)
        compose = partial(check, [*record.overrides, f"RUN.dir={quote_value(record.folder)}"])
        if _has_finished(record.folder, compose):
            replace(record, exit_code=0, passed_over=True).write(job.folder)
        else:
            left.append((number, swept))
    if left and prefixes is not None:
        prefixes.write()
        return prefixes.run([number - 1 for number, _ in left])
    if left:
        return _launch_runs(job, words, left, total=len(grid))
    return 0


def _reuses_prefixes(config: AttrDict | None) -> bool:
    return config is not None and bool(config.get("RUN", {}).get("reuse_prefix"))


def _plan_prefixes(
    job: Job,
    words: SweepOverrides,
    grid: Sequence[Sequence[str]],
    config_dir: str | Path | None,
    terminal: Terminal,
) -> SharedPrefixes | None:
    """Find the updates that the runs of a grid share, and print them; None without a grid."""
    if not grid:
        return None
    prefixes = SharedPrefixes(job, grid, config_dir, partial(_launch_paused, job, words))
    for line in (prefixes.tree.summarize(), *prefixes.tree.format_lines()):
        terminal.say(line)
    return prefixes


def _end_plan(folder: str, words: SweepOverrides, *, is_planned: bool) -> int:
    """Leave no folder behind, because nothing is started."""
    # Only an empty folder can be removed: the folder of an earlier sweep has files, and stays.
    with suppress(OSError):
        Path(folder).rmdir()
    if not is_planned:
        raise ConfigError(
            f"{SWEEPER_KEY}={words.sweeper}: which runs are trained to their end is not known "
            "before they start; only a grid without pruning can be planned",
            code="sweep.not_planned",
        )
    return 0


def _check_sweeper(words: SweepOverrides, prune: PruneSettings | None) -> None:
    """Reject pruning with a sweeper that launches its runs itself, or of repeated configs."""
    if prune is not None and words.sweeper not in ("basic", "optuna"):
        raise ConfigError(
            f"{PRUNE_KEY} = {prune.name}: {SWEEPER_KEY}={words.sweeper} chooses and launches its "
            f"runs itself; list the values, or give {SWEEPER_KEY}=optuna",
            code="sweep.prune_sweeper",
        )
    if prune is not None and words.repeated:
        raise ConfigError(
            f"{words.repeated[0].input_line}: {PRUNE_KEY} would leave some seeds or folds of a "
            "config out; prune with one of them, then repeat the best configs",
            code="sweep.prune_repeats",
        )


def _choose_pruning_monitor(words: SweepOverrides, job: Job) -> str:
    if words.sweeper == "optuna":
        return StudySettings.read(words.sweeper_words).monitor or job.monitor
    return job.monitor


def _run_pruned(pruned: PrunedSweep, words: SweepOverrides, grid: Sequence[Sequence[str]]) -> int:
    """Run a grid or a study with pruning."""
    if words.sweeper == "basic":
        pruned.prepare(grid, len(grid))
        return pruned.run_grid(grid)
    count = StudySettings.read(words.sweeper_words).n_trials
    fixed = len(words.fixed)
    pruned.prepare([sample[fixed:] for sample in words.list_samples()], count)
    return pruned.run_trials(words, count)


def _launch_paused(
    job: Job,
    words: SweepOverrides,
    runs: Sequence[tuple[int, Sequence[str]]],
    pauses: Mapping[str, int],
) -> int:
    """Launch runs that pause."""
    return _launch_runs(replace(job, pauses=pauses), words, runs)


def _launch_runs(
    job: Job, words: SweepOverrides, runs: Sequence[tuple[int, Sequence[str]]], total: int = 0
) -> int:
    """Launch some runs through Hydra, and return 0 unless they could not be launched."""
    batch = tuple((number, tuple(swept)) for number, swept in runs)
    # Hydra sweeps over indices in the batch instead of the values: it numbers jobs from 0 in every
    # launch, and would parse and quote each value once more.
    indices = ",".join(str(index) for index in range(len(batch)))
    return _run_hydra(
        replace(job, batch=batch, total=total), [*words.hydra, f"+{NUMBER_KEY}={indices}"]
    )


def _report_failures(job: Job, code: int) -> int:
    """List failed runs on standard error, and return the exit code of the sweep."""
    # Failures of an earlier call, whose values may not be swept any more, do not count.
    records = [record for record in read_job_records(job.folder) if record.sweep == job.sweep]
    failed = [record for record in records if record.exit_code != 0]
    number = job.stop.signal_number()
    job.stop.clear()
    stderr = LastingStream(sys.stderr)  # the terminal may have been closed
    if number:
        name = signal.Signals(number).name
        stderr.write(f"stopped by {name}; re-run the command to resume\n")
        return 128 + number
    for record in failed:
        reason = f"exit code {record.exit_code}"
        if record.exit_code is None:
            reason = "its end was not observed"
        stderr.write(f"{reason}: {' '.join(record.overrides)} in {record.folder}\n")
    return code or int(bool(failed))


def _run_hydra(job: Job, words: Sequence[str]) -> int:
    """Run Hydra, and return its exit code."""
    arguments = [
        f"{FOLDER_KEY}={quote_value(job.folder)}",
        # Hydra would write folders and logs of its own next to those of the runs.
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        *words,
    ]
    before = sys.argv
    sys.argv = [before[0], "--multirun", *arguments]  # hydra.main reads nothing but sys.argv
    try:
        hydra.main(version_base="1.3", config_path=None)(job)()
        # After a signal a launcher may return while its workers still save their checkpoints.
        job.stop.wait()
    except SystemExit as ended:
        job.stop.wait()
        if isinstance(ended.code, int):
            return ended.code
        return 1
    finally:
        sys.argv = before
    return 0


def _make_folder(folder: str) -> str:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{FOLDER_KEY} = {folder!r} cannot be made: {error.strerror}; give a folder that can "
            "be written",
            code="sweep.folder",
        ) from error
    return folder


def _has_finished(folder: str, compose: Callable[[], AttrDict | None]) -> bool:
    """Return whether the run in a folder has finished with the config it would be started with."""
    run = RunView(folder)
    # The status first: composing a config takes longer than reading a file.
    if run.status.state != "finished":
        return False
    config = compose()
    if config is None:
        return False
    # Compared as text, without parsing: whatever differs is left to the rules of a resume.
    return run.config_text == OmegaConf.to_yaml(OmegaConf.create(config.plain()))


def _choose_monitor(config: AttrDict | None) -> str:
    """Return the metric by which runs are compared: CHECKPOINT.best.monitor, or the first metric of
    the first test; empty if there is none."""
    if config is None:
        return ""
    if config.CHECKPOINT.best.monitor is not None:
        return str(config.CHECKPOINT.best.monitor)
    with suppress(ConfigError):
        return find_first_metric(config)
    return ""
