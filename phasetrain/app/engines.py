"""From overrides to a result: the engine that RUN.engine names."""

import gc
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Literal

from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup, is_started_here, is_submitted, resolve_config
from phasetrain.config.addons import find_service, import_object, require_service
from phasetrain.config.engines import list_engines
from phasetrain.config.sections import DistributedSection
from phasetrain.config.trust import trust_only
from phasetrain.distributed.placement import find_placement
from phasetrain.errors import ConfigError, PhasetrainError, needs_traceback
from phasetrain.runs.records import shorten_error
from phasetrain.runs.view import read_status
from phasetrain.runtime.clock import Clock
from phasetrain.runtime.signals import reject_exit
from phasetrain.runtime.terminal import Terminal

if TYPE_CHECKING:
    from phasetrain.app.stored.stored_config import StoredConfig
    from phasetrain.app.train.training import Loop
    from phasetrain.distributed import World
    from phasetrain.hooks import Hook

log = logging.getLogger(__name__)

OnException = Literal["raise", "ignore"]
"""What to do with an exception of a run: raise it, or return it in the result."""


class RanksNeededError(ConfigError):
    """A run needs several ranks or a supervisor, and nobody has started them (exit code 2).

    Args:
        config: config of the run.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        launch = config["LAUNCH"]
        processes = launch["processes"]
        given, instead = f"processes = {processes}", f"torchrun --nproc-per-node={processes}"
        if processes == 1:
            given, instead = f"supervise = {launch['supervise']!r}", "`phasetrain` or tools/run.py"
        super().__init__(
            f"LAUNCH.{given}: not every command starts processes, and this one and the Python API "
            f"do not; start it with {instead}",
            code="launch.needs_command",
        )
        self.config = config


def require_ranks(setup: Setup) -> None:
    """Check that the ranks of a run that starts them on this machine have been started.

    Raises:
        RanksNeededError: they have not.
    """
    is_alone = "WORLD_SIZE" not in os.environ and setup.place.size == 1
    if is_alone and is_started_here(setup.config):
        raise RanksNeededError(setup.config)


@dataclass(frozen=True)
class Extras:
    """Arguments of a run that no config holds.

    Attributes:
        hooks: label -> hook, in addition to the hooks in section HOOKS.
        loop: runs the engine of a training; None for `engine.run()`.
        clock: measures this attempt.
    """

    hooks: "Mapping[str, Hook]"
    loop: "Loop | None"
    clock: Clock


RunEngine = Callable[[Setup, Extras], RunResult]


def run_engine(  # noqa: PLR0913 - all but one are keywords
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    hooks: "Mapping[str, Hook] | None" = None,
    loop: "Loop | None" = None,
    terminal: Terminal | None = None,
    clock: Clock | None = None,
    stored: "StoredConfig | None" = None,
    on_exception: OnException = "raise",
    from_python: bool = False,
    warnings: Sequence[str] = (),
    owns_process: bool = False,
) -> RunResult:
    """Run the engine that the config names, without reading back its history.

    Args:
        overrides: such as `["experiment=digits", "OPTIMIZER.lr=0.1"]`.
        config_dir: folder with the user's configs.
        hooks: label -> hook, in addition to the hooks in section HOOKS.
        loop: runs the engine of a training; a custom loop iterates over `engine.steps()`.
        terminal: where to print; standard output by default.
        clock: measures this attempt; by default it starts now.
        stored: the config of a run folder, which the overrides change; see `use_folder`.
        on_exception: `ignore` returns an exception in the result once the config is valid.
        from_python: a program reads the result, so that RUN.verbosity = quiet prints errors only.
        warnings: lines about the overrides, printed by rank 0 once the config is valid.
        owns_process: whether the process ends with this run.

    Raises:
        RanksNeededError: LAUNCH.processes asks for ranks, which the command line starts.
        PhasetrainError: see `phasetrain.errors`.
    """
    placement = find_placement(os.environ)
    extras = Extras(hooks or {}, loop, clock or Clock())
    if terminal is None:
        terminal = Terminal()
        if placement.rank:
            # every rank would print the same lines; the other ranks only write their log files
            terminal = Terminal(io.StringIO(), live=False)
    terminal.silent_if_quiet = from_python
    if "RUN.verbosity=verbose" in overrides:
        terminal.verbosity = "verbose"  # also for an error before the config is resolved
    with print_log(terminal), _log_traceback():
        with _pause_collection():
            setup = resolve_config(
                overrides, config_dir=config_dir, terminal=terminal, place=placement, stored=stored
            )
            extras.clock.end_part("imports and config")
            run = _import_engine(setup)
            if owns_process:
                # Not traversed by later collections, either. In a process that goes on, garbage of
                # other code would stay for ever.
                gc.freeze()
        terminal.verbosity = setup.config.RUN.verbosity
        require_ranks(setup)
        # Not before: the ranks that a command starts would print them again.
        for line in warnings:
            log.warning(line)
        if is_submitted(setup.config):
            submit = require_service(
                "submit", "submission", f"LAUNCH.cluster = {setup.config.LAUNCH.cluster!r}:"
            )
            return RunResult(
                "submitted", folder=setup.config.RUN.dir, reason=f"job {submit(setup)}"
            )
        if setup.config.LAUNCH.cluster == "debug":
            log.info("LAUNCH.cluster = debug: the run is not submitted, it runs in this process")
        # Parts are built in here: what the config of a folder names stays restricted until then.
        with trust_only(setup.trusted_paths):
            try:
                return _run_setup(setup, extras, run)
            # An interrupt by the keyboard is no Exception and is raised in any case.
            except Exception as error:
                if on_exception == "raise":
                    raise
                return _failed_result(setup, error)


@contextmanager
def _pause_collection() -> Iterator[None]:
    """Pause the garbage collection: the imports of torch make half a million objects, no garbage
    among them, and collections in between would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _import_engine(setup: Setup) -> RunEngine:
    """Return the function of the engine."""
    run: RunEngine = import_object(list_engines()[setup.config.RUN.engine].run)
    return run


@reject_exit()
def _run_setup(setup: Setup, extras: Extras, run: RunEngine) -> RunResult:
    name = setup.config.RUN.engine
    engine = list_engines()[name]
    size = setup.place.size
    if not engine.is_distributed:
        if size > 1:
            raise ConfigError(
                f"RUN.engine = {name!r}: expected one process, not a world size of {size}; "
                "start it without torchrun or srun",
                code="config.world_size",
            )
        return run(setup, extras)
    from phasetrain.distributed import join_process_group

    section = setup.config.DISTRIBUTED
    # torchrun with one process still expects a process group, because hooks and user code of a
    # multi-process run may call torch.distributed directly
    is_launched = "WORLD_SIZE" in os.environ
    with (
        join_process_group(
            setup.place,
            setup.machine.device,
            timeout_seconds=section.timeout_seconds,
            alone=is_launched,
        ) as world,
        _check_collectives(world, section),
    ):
        return run(replace(setup, world=world), extras)


def _check_collectives(world: "World", section: DistributedSection) -> AbstractContextManager[None]:
    """Return the context in which the collective calls of all ranks are compared, if
    DISTRIBUTED.debug is set."""
    if world.is_single_process or not section.debug:
        return nullcontext()
    check = require_service("check_collective_order", "observe", "DISTRIBUTED.debug = true:")
    context: AbstractContextManager[None] = check(world)
    return context


def _failed_result(setup: Setup, error: Exception) -> RunResult:
    """Return the result of a run that has failed, for a caller who continues."""
    folder = setup.config.RUN.dir
    reason = f"{type(error).__name__}: {shorten_error(error)}"
    log.error("the run has failed, and on_exception = 'ignore' returns the error: %s", reason)
    code = error.exit_code if isinstance(error, PhasetrainError) else 1
    updates = read_status(folder).updates
    return RunResult(
        "failed", exit_code=code, folder=folder, reason=reason, updates=updates, error=error
    )


def run_train(setup: Setup, extras: Extras) -> RunResult:
    """Train, with tests in between (RUN.engine=train)."""
    from phasetrain.app.train.train import train
    from phasetrain.engine.loop import PhaseEngine

    if prepare := find_service("prepare_training"):
        setup.world.run_on_main(lambda: prepare(setup))
    return train(setup, extras.hooks, extras.loop or PhaseEngine.run, extras.clock)


def run_test(setup: Setup, extras: Extras) -> RunResult:
    """Test a checkpoint on every test split (RUN.engine=test)."""
    from phasetrain.app.test import evaluate

    if complete := find_service("complete_from_record"):
        setup = complete(setup)
    return evaluate(setup, extras.hooks)


def run_plan(setup: Setup, extras: Extras) -> RunResult:
    """Print the plan (RUN.engine=plan)."""
    from phasetrain.app.preflight.preview import preview

    return RunResult("planned", folder=setup.config.RUN.dir, details=preview(setup))


@contextmanager
def _log_traceback() -> Iterator[None]:
    """Print the whole traceback of an error on a verbose terminal."""
    try:
        yield
    except Exception as error:
        if needs_traceback(error):
            log.debug("".join(format_exception(error)).rstrip())
        raise


@contextmanager
def print_log(terminal: Terminal) -> Iterator[None]:
    """Print the log of phasetrain on the terminal."""
    logger = logging.getLogger("phasetrain")
    handler = terminal.make_handler()
    level = logger.level
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)  # the handler filters by RUN.verbosity
    logger.propagate = False  # otherwise a root handler of the user prints each line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
