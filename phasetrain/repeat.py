"""A run again from its folder, in a new one, and whether every bit is the same (`tools/run.py --from FOLDER`)."""

import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from phasetrain.config.changes import ABSENT, Change, differences
from phasetrain.config.check import shown
from phasetrain.config.words import literal
from phasetrain.diff import LENGTH, diff
from phasetrain.distributed import placed
from phasetrain.errors import ConfigError
from phasetrain.setup import as_asked, settle
from phasetrain.storage import Storage, open_storage
from phasetrain.terminal import Terminal
from phasetrain.train import Result

log = logging.getLogger(__name__)

OWN = ("RUN.dir", "RUN.resume", "RUN.allow", "RUN.step")
"""Keys that belong to a folder, and not to what is trained in it."""

NOT_TAKEN = ("RUN.", "LAUNCH.", "DISTRIBUTED.timeout_seconds")
"""Beginnings of keys in which a repetition may differ from its original."""


@dataclass(frozen=True)
class Original:
    """A run that is to be repeated.

    Attributes:
        folder: its path.
        overrides: what it was started with, without what belongs to its folder.
        config_dir: the folder of configs of its own, or None.
        config: every value.
        environment: content of environment.json; empty where there is none.
        status: content of status.json; empty where there is none.
    """

    folder: str
    overrides: tuple[str, ...]
    config_dir: str | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    status: Mapping[str, Any]


def repeat(
    folder: str, overrides: Sequence[str], *, config_dir: str | None, run: Callable[[Sequence[str], str | None], Result]
) -> tuple[str, int]:
    """Repeat the run in a folder in a new one, and return what to print of how they compare, and the exit code.

    Values that the config files gave then and do not give now are those of then, and the number of threads is that of
    the original.

    Args:
        folder: of the original.
        overrides: in addition to those of the original; RUN.dir is `FOLDER-again` otherwise.
        config_dir: a folder of configs, in place of that of the original.
        run: does what the command line with overrides and this folder does.

    Returns:
        Nothing on any process but the main one. The code is 0 where every bit is the same as far as the original went,
        1 where the runs part; that of the run where it did not finish.

    Raises:
        ConfigError: the folder holds no run that can be repeated.
    """
    original = read_original(folder, config_dir)
    words = again(original, overrides)
    result = run(words, original.config_dir)
    if placed(os.environ).rank:
        return "", result.exit_code
    if result.state != "finished":
        return f"{result.folder} has not finished ({result.reason}); there is nothing to compare yet", result.exit_code
    return verdict(original, result)


def read_original(folder: str, config_dir: str | None = None) -> Original:
    """Return what a run folder tells of how it came about.

    Raises:
        ConfigError: overrides.yaml or config.yaml is not there, or broken.
    """
    path = folder.rstrip("/")
    storage = open_storage(path)
    given, config = (_yaml(storage, f"{path}/{name}") for name in ("overrides.yaml", "config.yaml"))
    if not isinstance(given, list) or not isinstance(config, dict):
        raise ConfigError(
            f"--from {folder}: overrides.yaml and config.yaml of a run are expected there, a list and a mapping; name "
            "the folder of a run"
        )
    environment, status = (storage.read_json(f"{path}/{name}.json") for name in ("environment", "status"))
    environment = environment if isinstance(environment, dict) else {}
    recorded = environment.get("config_dir")
    if config_dir is None and recorded is not None and not Path(recorded).is_dir():
        raise ConfigError(
            f"--from {folder}: it was started with --config-dir {recorded}, which is not there; give the folder with "
            "--config-dir"
        )
    return Original(
        path,
        tuple(str(word) for word in given if _key(str(word)) not in OWN),
        config_dir or recorded,
        {str(key): value for key, value in config.items()},
        environment,
        status if isinstance(status, dict) else {},
    )


def again(original: Original, overrides: Sequence[str] = ()) -> list[str]:
    """Return the overrides with which a run is repeated; what is taken over from the original is logged."""
    words, new = [*original.overrides], {_key(word) for word in overrides}
    threads, processes = (original.environment.get(key) for key in ("threads", "processes"))
    if original.config.get("MACHINE", {}).get("threads") is None and isinstance(threads, int):
        words.append(f"MACHINE.threads={threads}")
    changes = _changes(original, [*words, *overrides])
    for change in changes:
        newer = change.old is ABSENT and change.path.startswith("HOOKS.")  # a hook that did not exist then
        if change.path in new or change.path.startswith(NOT_TAKEN) or change.path == "MACHINE.threads" or newer:
            continue
        value = "null" if change.old is ABSENT else literal(change.old, change.path)
        words.append(f"{change.path}={value}")
        log.info("%s = %s, as it was; it would be %s now", change.path, shown(change.old), shown(change.new))
    size = placed(os.environ).size
    if isinstance(processes, int) and processes != size:
        log.warning(
            "the original ran on %d processes, this is one of %d: equal bits are promised on as many only",
            processes,
            size,
        )
    if "RUN.dir" not in new:
        words.append(f"RUN.dir={literal(_free(original.folder), 'RUN.dir')}")
    return [*words, *overrides]


def verdict(original: Original, result: Result) -> tuple[str, int]:
    """Return in words whether a repetition has the bits of the original, and 0 or 1."""
    folder, other = original.folder, result.folder
    before = original.status.get("digest") if original.status.get("state") == "finished" else None
    try:
        found = diff(folder, other)
    except ConfigError as error:
        return _by_weights(folder, before, result.digest, str(error))
    updates = len(found.one.ledger or ()) or result.updates
    if not found.equal and found.components[0] == LENGTH and before is None:
        return f"bit-identical as far as {folder} went, which has not finished. {found.verdict}", 0
    if not found.equal:
        return f"NOT bit-identical to {folder}.\n\n{found.report()}", 1
    if before is not None and before != result.digest:
        return (
            f"NOT bit-identical to {folder}: {updates} updates and all measured values are equal, and the weights at "
            f"the end are not: sha256 {before} there, {result.digest} in {other}",
            1,
        )
    lines = len(found.one.metrics)
    weights = f"weights sha256 {result.digest}, " if before else "which has not finished: "
    return f"bit-identical to {folder}: {weights}{updates} updates, {lines} lines of metrics.jsonl", 0


def _by_weights(folder: str, before: Any, digest: str, reason: str) -> tuple[str, int]:
    if before is None:
        return f"{folder} cannot be compared: {reason}", 1
    if before == digest:
        return f"the weights are bit-identical to those of {folder}, sha256 {digest}; nothing else was kept", 0
    return f"NOT bit-identical to {folder}: weights sha256 {before} there, {digest} here", 1


def _changes(original: Original, words: Sequence[str]) -> list[Change]:
    """Return in which values the config that overrides make now differs from that of the original."""
    setup = settle(
        words, config_dir=original.config_dir, terminal=Terminal(io.StringIO(), live=False), place=placed(os.environ)
    )
    before = as_asked(dict(original.config), setup.composed.config)
    return differences(before, as_asked(setup.config.plain(), setup.composed.config), setup.schema)


def _free(folder: str) -> str:
    """Return the first name for a repetition under which none has finished."""
    for number in count(1):
        name = f"{folder}-again" if number == 1 else f"{folder}-again-{number}"
        found = open_storage(name).read_json(f"{name}/status.json")
        if not isinstance(found, dict) or found.get("state") != "finished":
            return name
    raise AssertionError("numbers do not end")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _yaml(storage: Storage, path: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(storage.read(path).decode()))
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, YAMLError):
        return None
