"""A run again from its folder, in a new one, and whether every bit is the same
(`tools/run.py --from FOLDER`)."""

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

from phasetrain.commands.result import RunResult
from phasetrain.commands.runs.diff import LENGTH, diff, side
from phasetrain.commands.setup import Setup, as_asked, settle
from phasetrain.commands.train.resume import format_deviations
from phasetrain.config.changes import ABSENT, LABELS, Change, differences
from phasetrain.config.compose.override_text import literal
from phasetrain.config.compose.sources import EXPERIMENT
from phasetrain.config.problems import shown
from phasetrain.config.schema import part_pattern
from phasetrain.distributed import find_placement
from phasetrain.errors import ConfigError
from phasetrain.runs.ledger import FILE
from phasetrain.runs.records import EnvironmentRecord, RunFiles, StatusRecord, read_status
from phasetrain.runtime.storage import Storage, open_storage
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

OWN = ("RUN.dir", "RUN.resume", "RUN.allow", "RUN.step")
"""Keys that belong to a folder, and not to what is trained in it."""

ESSENTIAL = ("RUN", "DATA", "MODEL", "OPTIMIZER")
"""Sections that the config of every run has."""

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
        environment: content of environment.json.
        status: content of status.json.
    """

    folder: str
    overrides: tuple[str, ...]
    config_dir: str | None
    config: Mapping[str, Any]
    environment: EnvironmentRecord
    status: StatusRecord


def repeat(
    folder: str,
    overrides: Sequence[str],
    *,
    config_dir: str | None,
    run: Callable[[Sequence[str], str | None], RunResult],
) -> tuple[str, int]:
    """Repeat the run in a folder in a new one, and return what to print of how they compare, and
    the exit code.

    Values that the config files gave then and do not give now are those of then, and the number of
    threads is that of the original.

    Args:
        folder: of the original.
        overrides: in addition to those of the original; RUN.dir is `FOLDER-again` otherwise.
        config_dir: a folder of configs, in place of that of the original.
        run: does what the command line with overrides and this folder does.

    Returns:
        Nothing on any process but the main one. The code is 0 where every bit is the same as far as
        the original went, 1 where the runs part; that of the run where it did not finish.

    Raises:
        ConfigError: the folder holds no run that can be repeated, or RUN.dir one in which nothing
            would be trained.
    """
    original = read_original(folder, config_dir)
    _refuse_nothing(original)
    words = again(original, overrides)
    result = run(words, original.config_dir)
    if find_placement(os.environ).rank:
        return "", result.exit_code
    if result.state != "finished":
        return (
            f"{result.folder} has not finished ({result.reason}); there is nothing to compare yet",
            result.exit_code,
        )
    return verdict(original, result)


def read_original(folder: str, config_dir: str | None = None) -> Original:
    """Return what a run folder tells of how it came about.

    Raises:
        ConfigError: overrides.yaml or config.yaml is not there, or broken.
    """
    path = folder.rstrip("/")
    storage = open_storage(path)
    given, config = (_yaml(storage, f"{path}/{name}") for name in ("overrides.yaml", "config.yaml"))
    whole = isinstance(config, dict) and all(
        isinstance(config.get(section), dict) for section in ESSENTIAL
    )
    if not isinstance(given, list) or not whole:
        raise ConfigError(
            f"--from {folder}: overrides.yaml and config.yaml of a run are expected there, a list, and a mapping of "
            "every section; name the folder of a run"
        )
    files = RunFiles(path, storage)
    environment = files.environment()
    recorded = environment.config_dir
    if config_dir is None and not isinstance(recorded, str | None):
        raise ConfigError(
            f"--from {folder}: config_dir in its environment.json is {recorded!r}; expected a text or null; give the "
            "folder with --config-dir"
        )
    if config_dir is None and recorded is not None and not Path(recorded).is_dir():
        raise ConfigError(
            f"--from {folder}: it was started with --config-dir {recorded}, which is not there; give the folder with "
            "--config-dir"
        )
    return Original(
        path,
        tuple(str(word) for word in given if _key(str(word)) not in OWN),
        config_dir or recorded or None,
        {str(key): value for key, value in config.items()},
        environment,
        files.status(),
    )


def again(original: Original, overrides: Sequence[str] = ()) -> list[str]:
    """Return the overrides with which a run is repeated; what is taken over from the original is
    logged."""
    words = [*original.overrides]
    new = {_key(word) for word in overrides}
    for line in format_deviations(original.environment.content.get("departures")):
        log.warning(
            "%s is more than the command that is repeated, and may part from it: %s",
            original.folder,
            line,
        )
    threads = original.environment.threads
    processes = original.environment.content.get("processes")
    if original.config.get("MACHINE", {}).get("threads") is None and threads is not None:
        words.append(f"MACHINE.threads={threads}")
    setup = settle(
        [*words, *overrides],
        config_dir=original.config_dir,
        terminal=Terminal(io.StringIO(), live=False),
        place=find_placement(os.environ),
    )
    if setup.config.RUN.engine != "train":
        raise ConfigError(
            f"--from {original.folder} with RUN.engine = {setup.config.RUN.engine!r}: a training is repeated; leave "
            "RUN.engine out"
        )
    if "RUN.dir" in new:
        _refuse_folder(original.folder, setup.config.RUN.dir)
    for change in _changes(original, setup):
        newer = change.old is ABSENT and change.path.startswith(
            "HOOKS."
        )  # a hook that did not exist then
        given = any(_covers(key, change.path) for key in new)
        if given or change.path.startswith(NOT_TAKEN) or change.path == "MACHINE.threads" or newer:
            continue
        word = _as_then(change, original.config)
        if word.startswith("~") and not any(
            _covers(word[1:], path) for path in setup.composed.origins
        ):
            continue  # it follows from others
        if word not in words:
            words.append(word)
        log.info(
            "%s = %s, as it was; it would be %s now",
            change.path,
            shown(change.old),
            shown(change.new),
        )
    size = find_placement(os.environ).size
    if isinstance(processes, int) and processes != size:
        log.warning(
            "the original ran on %d processes, this is one of %d: equal bits are promised on as many only",
            processes,
            size,
        )
    if "RUN.dir" not in new:
        words.append(f"RUN.dir={literal(_free(original.folder), 'RUN.dir')}")
    return [*words, *overrides]


def verdict(original: Original, result: RunResult) -> tuple[str, int]:
    """Return in words whether a repetition has the bits of the original, and 0 or 1."""
    folder = original.folder
    other = result.folder
    before = original.status.digest if original.status.state == "finished" else None
    try:
        found = diff(folder, other)
    except ConfigError as error:
        return _by_weights(original, before, result.digest, str(error))
    updates = len(found.one.ledger or ()) or result.updates
    if not found.equal and found.components[0] == LENGTH and before is None:
        return f"bit-identical as far as {folder} went, which has not finished. {found.verdict}", 0
    if not found.equal:
        return f"NOT bit-identical to {folder}.\n\n{found.report()}{_causes(original)}", 1
    if before is not None and before != result.digest:
        return (
            f"NOT bit-identical to {folder}: {updates} updates and all measured values are equal, and the weights at "
            f"the end are not: sha256 {before} there, {result.digest} in {other}{_causes(original)}",
            1,
        )
    lines = len(found.one.metrics)
    weights = f"weights sha256 {result.digest}, " if before else "which has not finished: "
    return (
        f"bit-identical to {folder}: {weights}{updates} updates, {lines} lines of metrics.jsonl",
        0,
    )


def _by_weights(original: Original, before: Any, digest: str, reason: str) -> tuple[str, int]:
    if before is None:
        return f"{original.folder} cannot be compared: {reason}", 1
    if before == digest:
        return (
            f"the weights are bit-identical to those of {original.folder}, sha256 {digest}; nothing else was kept",
            0,
        )
    there = f"NOT bit-identical to {original.folder}: weights sha256 {before} there, {digest} here"
    return f"{there}{_causes(original)}", 1


def _causes(original: Original) -> str:
    """Return in what the original was more than its command, to be put below a verdict; empty where
    in nothing."""
    told = format_deviations(original.environment.content.get("departures"))
    head = "\n\nNo repetition was to be expected. The original is more than its command:\n"
    if told:
        return head + "\n".join(f"  {line}" for line in told)
    return ""


def _refuse_nothing(original: Original) -> None:
    """Refuse an original that has kept nothing that a repetition could be compared with."""
    if original.status.state == "finished" and original.status.digest:
        return
    try:
        found = side(original.folder)
        reason = ""
    except ConfigError as error:
        found = None
        reason = f" ({error})"
    if found is None or not (found.ledger or found.metrics):
        raise ConfigError(
            f"--from {original.folder}: it has not finished, and there is no update in its {FILE} and no line in its "
            f"metrics.jsonl to compare a repetition with{reason}; go on with it first: phasetrain "
            f"RUN.dir={original.folder}, with the words in its overrides.yaml"
        )


def _refuse_folder(original: str, chosen: str) -> None:
    """Refuse a folder in which nothing would be trained."""
    local = "://" not in original + chosen
    if local:
        same = Path(original).resolve() == Path(chosen).resolve()
    else:
        same = original == chosen.rstrip("/")
    if same or _has_finished(chosen):
        why = "is the folder of the original" if same else "holds a run that has finished"
        raise ConfigError(
            f"--from {original} RUN.dir={chosen}: this {why}, and nothing would be repeated; give another folder, or "
            f"leave RUN.dir out for {_free(original)}"
        )


def _as_then(change: Change, config: Mapping[str, Any]) -> str:
    """Return the override that gives a place the value that it has in a config, or takes it
    away."""
    path = change.path
    value = change.old
    if value is ABSENT:
        path, value = (path, None) if part_pattern(path) in LABELS else _outermost(config, path)
    if value is ABSENT:
        return f"~{path}"
    return f"{path}={literal(value, path)}"


def _outermost(config: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """Return the first place on the way to `path` that a config does not have, or that is no
    mapping there."""
    node: Any = config
    names = path.split(".")
    for depth, name in enumerate(names, 1):
        node = node.get(name, ABSENT)
        if not isinstance(node, Mapping):
            return ".".join(names[:depth]), node
    raise AssertionError("the config has no value at the path")


def _changes(original: Original, setup: Setup) -> list[Change]:
    """Return in which values a config that is made now differs from that of the original."""
    before = as_asked(dict(original.config), setup.composed.config)
    return differences(before, as_asked(setup.config.plain(), setup.composed.config), setup.schema)


def _free(folder: str) -> str:
    """Return the first name for a repetition under which none has finished."""
    for number in count(1):
        name = f"{folder}-again" if number == 1 else f"{folder}-again-{number}"
        if not _has_finished(name):
            return name
    raise AssertionError("numbers do not end")


def _has_finished(folder: str) -> bool:
    return read_status(folder).state == "finished"


def _covers(key: str, path: str) -> bool:
    """Tell whether an override of `key` says what stands at `path`; another experiment says
    everything."""
    return key == EXPERIMENT or path == key or path.startswith(f"{key}.")


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _yaml(storage: Storage, path: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(storage.read(path).decode()))
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, YAMLError, RecursionError):
        return None
