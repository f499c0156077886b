"""The entry: flags, config, and the engine that RUN.engine names; the one place where all names
meet.

phasetrain [experiment=NAME] [SECTION=GROUP] [SECTION.key=value ...]
"""

import argparse
import gc
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from omegaconf import OmegaConf

from phasetrain.commands.extract.extract import extract
from phasetrain.commands.find import find_batch_size, find_lr
from phasetrain.commands.help import general_help, section_help
from phasetrain.commands.plan.preview import preview
from phasetrain.commands.replay.replay import replay
from phasetrain.commands.setup import Setup, settle, submitted
from phasetrain.commands.test import evaluate
from phasetrain.commands.train.train import Loop, Result, train
from phasetrain.distributed import (
    Placement,
    check_collective_order,
    find_placement,
    join_process_group,
)
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import ConfigError, PeerError, PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.runs.lock import process_age
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

LAUNCHER_SECONDS = 0.3
"""How long a process that ends with the error of another one lets torchrun see that one first: it
looks every 0.1 s."""

FINDERS: Mapping[str, Callable[[Setup], Result]] = MappingProxyType(
    {"find_lr": find_lr, "find_batch_size": find_batch_size}
)
"""Engines that try something out before a run."""

USAGE = "phasetrain [flags] [experiment=NAME] [SECTION=GROUP] [SECTION.key=value ...]"


def console() -> None:
    """Run the command line and end the process with its exit code."""
    # what was imported stays: the collector need not look at torch's objects again and again
    gc.freeze()
    sys.exit(main(clock=Clock(time.perf_counter() - process_age())))


def main(argv: Sequence[str] | None = None, *, clock: Clock | None = None) -> int:
    """Run the command line `argv` and return the exit code; errors are printed without a traceback.

    Args:
        argv: the words of the command line; those of this process by default.
        clock: where the time of the attempt goes; by default it begins now.
    """
    try:
        flags, overrides = _parse(sys.argv[1:] if argv is None else argv)
        if flags.multirun and flags.original is not None:
            raise ConfigError(
                f"--from {flags.original} and -m: one run at a time can be repeated; leave one of the two out"
            )
        if flags.multirun:
            from phasetrain.commands.sweep import (
                sweep,  # Hydra's launchers are slow to import, and rarely wanted
            )

            return sweep(
                overrides,
                config_dir=flags.config_dir,
                check=lambda one: _settled(one, flags).config,
            )
        if flags.original is not None:
            from phasetrain.commands.rerun import repeat

            again = partial(_again, clock=clock)
            with printed(Terminal()):
                text, code = repeat(
                    flags.original, overrides, config_dir=flags.config_dir, run=again
                )
            say(text)
            return code
        if flags.cfg:
            say(OmegaConf.to_yaml(OmegaConf.create(_settled(overrides, flags).config.plain())))
            return 0
        with warnings_logged():
            return run(overrides, config_dir=flags.config_dir, clock=clock).exit_code
    except PhasetrainError as error:
        sys.stderr.write(told(error, os.environ))
        recorded_failure(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # a traceback, which torchrun shows as well
        recorded_failure(error)
        raise


def run(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    hooks: Mapping[str, Hook] | None = None,
    loop: Loop = PhaseEngine.run,
    terminal: Terminal | None = None,
    clock: Clock | None = None,
) -> Result:
    """Do what the command line with these overrides does, and return what came of it.

    Args:
        overrides: such as `["experiment=digits", "OPTIMIZER.lr=0.1"]`.
        config_dir: a folder with configs of your own.
        hooks: label -> hook, in addition to those under HOOKS.
        loop: runs the engine of a training; a loop of your own goes through `engine.steps()`.
        terminal: where to print; standard output by default.
        clock: where the time of the attempt goes; by default it begins now.

    Raises:
        PhasetrainError: see `phasetrain.errors`.

    Example:
        >>> result = run(["PHASES.epochs=2", "RUN.dir=/tmp/two-epochs"])
        >>> result.metrics["test/accuracy"]
    """
    place, clock = find_placement(os.environ), clock or Clock()
    terminal = terminal or (Terminal() if place.rank == 0 else Terminal(io.StringIO(), live=False))
    with printed(terminal):
        setup = settle(overrides, config_dir=config_dir, terminal=terminal, place=place)
        terminal.verbosity = setup.config.RUN.verbosity
        engine = setup.config.RUN.engine
        timeout = setup.config.DISTRIBUTED.timeout_seconds
        if submitted(setup.config):
            from phasetrain.commands.submit import submit

            return Result("submitted", folder=setup.config.RUN.dir, reason=f"job {submit(setup)}")
        if setup.config.LAUNCH.cluster == "debug":
            log.info(
                "LAUNCH.cluster = debug: nothing is submitted, the run takes place in this process"
            )
        _refuse_many_processes(setup)
        if engine == "plan":
            preview(setup)
            return Result("planned", folder=setup.config.RUN.dir)
        if engine in FINDERS:
            return FINDERS[engine](setup)
        if engine == "replay":
            return replay(setup, hooks)
        launched = "WORLD_SIZE" in os.environ
        with (
            join_process_group(
                place, setup.machine.device, timeout_seconds=timeout, alone=launched
            ) as world,
            check_collective_order(
                world, timeout_seconds=timeout, debug=setup.config.DISTRIBUTED.debug
            ),
        ):
            setup = replace(setup, world=world)
            if engine == "extract":
                return extract(setup)
            if engine == "test":
                return evaluate(setup, hooks)
            return train(setup, hooks, loop, clock)


@contextmanager
def printed(terminal: Terminal) -> Iterator[None]:
    """Show on the terminal what phasetrain logs."""
    logger = logging.getLogger("phasetrain")
    handler = terminal.handler()
    level = logger.level
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def warnings_logged() -> Iterator[None]:
    """Log what libraries warn of through `warnings`, so that it is counted, and stands in
    log.txt."""

    def log_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: object,
        **__: object,
    ) -> None:
        log.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)

    with warnings.catch_warnings():
        warnings.showwarning = log_warning
        yield


def _again(overrides: Sequence[str], config_dir: str | None, clock: Clock | None) -> Result:
    return run(overrides, config_dir=config_dir, clock=clock)


def _settled(overrides: Sequence[str], flags: argparse.Namespace) -> Setup:
    return settle(overrides, config_dir=flags.config_dir)


def told(error: PhasetrainError, environment: Mapping[str, str]) -> str:
    """Return what a process prints of an error; of what another one has failed with, the main
    process tells.

    Where the main process is the one that is gone or stands still, process 1 tells.
    """
    try:
        place = find_placement(environment)
    except ConfigError:
        place = Placement()
    if isinstance(error, PeerError) and place.rank:
        is_rank_0_lost = error.code != PeerError.default_code and 0 in error.ranks
        if place.rank != 1 or not is_rank_0_lost:
            return ""
    text = "\n".join((str(error), *vars(error).get("__notes__", ())))
    if place.rank:
        return f"rank {place.rank} of {place.size}: {text}\n"
    return f"{text}\n"


def say(text: str) -> None:
    """Print a text, if there is any; what the encoding of the output cannot hold is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="\n" if text else "")  # noqa: T201


def recorded_failure(error: BaseException) -> None:
    """Write an error where torchrun looks for the first cause (TORCHELASTIC_ERROR_FILE).

    The file appears whole or not at all: torchrun ends the process meanwhile, and fails itself over
    half a file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    part = f"{path}.part"
    os.environ["TORCHELASTIC_ERROR_FILE"] = part
    try:
        handler.initialize()
        handler.record_exception(error)
        with suppress(OSError):
            Path(part).replace(path)
    finally:
        os.environ["TORCHELASTIC_ERROR_FILE"] = path
    if isinstance(error, PeerError):
        time.sleep(LAUNCHER_SECONDS)


def _refuse_many_processes(setup: Setup) -> None:
    engine = setup.config.RUN.engine
    size = setup.place.size
    if size > 1 and engine in ("plan", "replay", *FINDERS):
        raise ConfigError(
            f"RUN.engine = {engine!r} and {size} processes: this is work for one; start it without torchrun or srun"
        )


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="phasetrain", usage=USAGE, add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="SECTION")
    parser.add_argument("--cfg", nargs="?", const="job")
    parser.add_argument("--config-dir", metavar="DIR")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--from", dest="original", metavar="RUN_FOLDER")
    try:
        flags, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}\nusage: {USAGE}") from error
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        known = "--help, --cfg, --config-dir DIR, --from RUN_FOLDER, -m"
        raise ConfigError(
            f"{', '.join(unknown)}: no such flag; the flags are {known}\nusage: {USAGE}"
        )
    if flags.cfg not in (None, "job"):
        rest = [
            flags.cfg,
            *rest,
        ]  # `--cfg OPTIMIZER=adamw`: the flag takes no word, as Hydra's `--cfg job` does
    if flags.help is not None:
        print(section_help(flags.help) if flags.help else general_help(USAGE, flags.config_dir))  # noqa: T201
        raise SystemExit(0)
    return flags, rest
