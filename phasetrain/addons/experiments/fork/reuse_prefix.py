"""Starts a run from a checkpoint of a run next to it whose first updates are the same
(RUN.reuse_prefix)."""

import io
import logging
from dataclasses import replace

from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.fork.first_difference import find_first_difference
from phasetrain.addons.experiments.fork.fork_run import fork_run, list_fork_updates
from phasetrain.addons.experiments.fork.prefix_tree import TREE_FILE
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.app.stored.stored_config import read_newest_command
from phasetrain.app.train.resume import describe_environment, list_packages
from phasetrain.app.train.source_code import hash_sources
from phasetrain.checkpoint.promised import read_promised
from phasetrain.distributed import World
from phasetrain.errors import PhasetrainError
from phasetrain.runtime.format import format_count
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)


def reuse_prefix(setup: Setup) -> None:
    """Fork the run of a config from the run next to its folder that shares most updates with it, if
    its folder holds no run yet and there is one.

    Only runs with the same code, versions, machine and data count, and none that was changed on the
    way. Without one the run starts from scratch.
    """
    folder = setup.config.RUN.dir.rstrip("/")
    root, _, own_name = folder.rpartition("/")
    storage = open_storage(folder)
    # A folder with a lock belongs to a process that is about to start the run.
    if storage.list_names(folder):
        return
    root = root or "."
    # A sweep decides itself which run is forked from which.
    if storage.exists(f"{root}/{TREE_FILE}"):
        return
    # Compared on this rank alone: without a process group nothing waits for the others.
    run = ComparedRun.open(replace(setup, world=World()))
    best = (0, "")
    for name in sorted(storage.list_names(root)):
        candidate = f"{root}/{name}"
        if name == own_name or not storage.exists(f"{candidate}/checkpoints"):
            continue
        try:
            best = max(best, (_count_shared(setup, run, candidate), candidate))
        # A damaged run, or one whose code is not trusted, is not a reason not to train.
        except PhasetrainError as error:
            log.debug("%s cannot be reused: %s", candidate, error)
    updates, source = best
    if not updates:
        log.info("RUN.reuse_prefix: no run in %s shares updates with this one", root)
        return
    fork_run(source, updates, folder, setup=setup)
    log.info(
        "RUN.reuse_prefix: forked from %s; the first %s are not trained again",
        source,
        format_count(updates, "update"),
    )


def _count_shared(setup: Setup, run: ComparedRun, candidate: str) -> int:
    """Return after how many updates a run can be forked from another one; 0 if it cannot."""
    updates = list_fork_updates(candidate)
    promise = read_promised(candidate, "latest", open_storage(candidate))
    train = run.data.get("train")
    required = {
        "packages": list_packages(),
        "code": hash_sources(setup),
        "environment": _describe_machine(setup),
        "departures": [],
        "objects": {},
    }
    for name, value in required.items():
        # Made of the same functions when the checkpoint was saved.
        if promise.get(name, {} if name == "objects" else None) != value:
            log.debug("%s is not reused: %s differs", candidate, name)
            return 0
    if train is None or promise["data"].get("train") != train.fingerprint():
        return 0
    stored = read_newest_command(candidate)
    quiet = Terminal(io.StringIO(), live=False)
    other_setup = resolve_config([], stored=stored, terminal=quiet)
    other = ComparedRun.open(replace(other_setup, world=World()), [run])
    limit = find_first_difference(other, run).updates
    if setup.config.RUN.pause_at is not None:
        limit = min(limit, setup.config.RUN.pause_at)
    return max((update for update in updates if update <= limit), default=0)


def _describe_machine(setup: Setup) -> dict[str, object]:
    return describe_environment(setup, setup.machine)
