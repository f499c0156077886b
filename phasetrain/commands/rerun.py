"""Repeat a run from its folder in a new one, and check that every bit is the same
(`phasetrain rerun FOLDER`)."""

import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from phasetrain.commands.result import RunResult
from phasetrain.commands.runs.diff import LENGTH, diff, read_side
from phasetrain.commands.setup import Setup, resolve_config, without_derived
from phasetrain.commands.train.resume import format_deviations
from phasetrain.config.changes import ABSENT, LABELS, Change, compare_configs
from phasetrain.config.compose.override_text import format_literal, key_of
from phasetrain.config.compose.sources import EXPERIMENT, is_file_word
from phasetrain.config.problems import format_value
from phasetrain.config.schema import part_pattern
from phasetrain.distributed import find_placement
from phasetrain.errors import ConfigError
from phasetrain.hooks.observers import classify_hooks
from phasetrain.runs.ledger import FILE
from phasetrain.runs.records import EnvironmentRecord, RunFiles, StatusRecord, read_status
from phasetrain.runtime.storage import Storage, open_storage
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)

FOLDER_KEYS = ("RUN.dir", "RUN.resume", "RUN.allow", "RUN.step")
"""Keys about the folder, without effect on the training."""

ESSENTIAL = ("RUN", "DATA", "MODEL", "OPTIMIZER")
"""Sections in the config of every run."""

NOT_COPIED = ("RUN.", "LAUNCH.", "DISTRIBUTED.timeout_seconds")
"""Prefixes of keys in which a repetition may differ from its original."""


@dataclass(frozen=True)
class Original:
    """The run to repeat.

    Attributes:
        folder: its path.
        overrides: overrides of its command, without `FOLDER_KEYS`.
        config_dir: its folder of configs, or None.
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

    @property
    def deviations(self) -> list[str]:
        """How it differs from a run of its command alone, see `list_deviations`."""
        # the name of the key in existing run folders
        return format_deviations(self.environment.content.get("departures"))


@dataclass(frozen=True)
class Verdict:
    """The outcome of a repetition.

    Attributes:
        text: for people; empty on other ranks than 0.
        exit_code: 0 if every bit is the same as far as the original went, 1 if not, and the exit
            code of the repetition if it did not finish.
        folder: folder of the repetition.
        is_identical: whether every bit is the same; None if the runs could not be compared.
    """

    text: str
    exit_code: int
    folder: str
    is_identical: bool | None = None


def repeat(
    folder: str,
    overrides: Sequence[str],
    *,
    config_dir: str | None,
    run: Callable[[Sequence[str], str | None], RunResult],
) -> Verdict:
    """Repeat a run in a new folder, and return the verdict.

    Values from config files that have changed since, and the number of threads, are copied from the
    original.

    Args:
        folder: folder of the original.
        overrides: in addition to the overrides of the original; RUN.dir is `FOLDER-again` by
            default.
        config_dir: folder of configs, instead of the original's.
        run: runs overrides with a folder of configs.

    Raises:
        ConfigError: the folder contains no run that can be repeated, or RUN.dir is a folder in
            which nothing would be trained.
    """
    original = read_original(folder, config_dir)
    # before the repetition, which may take as long as the original
    _check_comparable(original)
    words = repeat_overrides(original, overrides)
    result = run(words, original.config_dir)
    # Rank 0 compares: the files of a run are the same for all ranks.
    if find_placement(os.environ).rank:
        return Verdict("", result.exit_code, result.folder)
    if result.state != "finished":
        return Verdict(
            f"{result.folder} has not finished ({result.reason}); there is nothing to compare yet",
            result.exit_code,
            result.folder,
        )
    text, is_identical = _compare_runs(original, result)
    return Verdict(text, int(not is_identical), result.folder, is_identical)


def read_original(folder: str, config_dir: str | None = None) -> Original:
    """Read the files that describe how a run was started.

    Raises:
        ConfigError: overrides.yaml or config.yaml is not there, or broken.
    """
    path = folder.rstrip("/")
    storage = open_storage(path)
    given, config = (
        _read_yaml(storage, f"{path}/{name}") for name in ("overrides.yaml", "config.yaml")
    )
    whole = isinstance(config, dict) and all(
        isinstance(config.get(section), dict) for section in ESSENTIAL
    )
    if not isinstance(given, list) or not whole:
        raise ConfigError(
            f"--from {folder}: expected overrides.yaml with a list and config.yaml with every "
            "section; give the folder of a run",
            code="rerun.no_run",
        )
    files = RunFiles(path, storage)
    environment = files.environment()
    recorded = environment.config_dir
    if config_dir is None and not isinstance(recorded, str | None):
        raise ConfigError(
            f"--from {folder}: config_dir in its environment.json is {recorded!r}, expected a "
            "text or null; give the folder with --config-dir",
            code="rerun.no_config_dir",
        )
    if config_dir is None and recorded is not None and not Path(recorded).is_dir():
        raise ConfigError(
            f"--from {folder}: it was started with --config-dir {recorded}, which does not exist; "
            "give the folder with --config-dir",
            code="rerun.no_config_dir",
        )
    words = [str(word) for word in given if key_of(str(word)) not in FOLDER_KEYS]
    return Original(
        path,
        tuple(_find_file(word, str(environment.content.get("folder", "."))) for word in words),
        config_dir or recorded or None,
        {str(key): value for key, value in config.items()},
        environment,
        files.status(),
    )


def repeat_overrides(original: Original, overrides: Sequence[str] = ()) -> list[str]:
    """Return the overrides of the repetition, and log the values that are copied from the
    original."""
    words = [*original.overrides]
    new = {key_of(word) for word in overrides}
    for line in original.deviations:
        log.warning(
            "%s differs from a run of its command alone, and the repetition may differ from it: %s",
            original.folder,
            line,
        )
    threads = original.environment.threads
    processes = original.environment.content.get("processes")
    # The number of threads is part of the bits, and its default depends on the machine.
    if original.config.get("MACHINE", {}).get("threads") is None and threads is not None:
        words.append(f"MACHINE.threads={threads}")
    setup = resolve_config(
        [*words, *overrides],
        config_dir=original.config_dir,
        terminal=Terminal(io.StringIO(), live=False),  # the repetition itself prints these notes
        place=find_placement(os.environ),
    )
    if setup.config.RUN.engine != "train":
        raise ConfigError(
            f"--from {original.folder} and RUN.engine = {setup.config.RUN.engine!r}: only a "
            "training can be repeated; remove RUN.engine",
            code="cli.conflict",
        )
    if "RUN.dir" in new:
        _check_folder(original.folder, setup.config.RUN.dir)
    for change in _list_changes(original, setup):
        word = _restore_word(change, original.config)
        if _is_kept(change, word, new, setup):
            continue
        if word not in words:
            words.append(word)
        log.info(
            "%s = %s, as in the original; the default is %s now",
            change.path,
            format_value(change.old),
            format_value(change.new),
        )
    size = find_placement(os.environ).size
    if isinstance(processes, int) and processes != size:
        log.warning(
            "the original had world size %d, this one has %d: bits are equal for an equal world "
            "size only",
            processes,
            size,
        )
    if "RUN.dir" not in new:
        words.append(f"RUN.dir={format_literal(_find_free_folder(original.folder), 'RUN.dir')}")
    return [*words, *overrides]


def _is_kept(change: Change, word: str, given: Set[str], setup: Setup) -> bool:
    """Return whether a value that has changed since the original stays as it is now.

    Args:
        change: of the value.
        word: override that would restore it.
        given: keys of the overrides of the repetition.
        setup: config of the repetition.
    """
    if any(_covers(key, change.path) for key in given):
        return True
    if change.path.startswith(NOT_COPIED) or change.path == "MACHINE.threads":
        return True
    if change.old is ABSENT and change.path.startswith("HOOKS."):
        return True  # a default hook of a newer release, which did not exist then
    # A removal of a path that no layer sets: it is derived from other values, which are restored.
    is_set = any(_covers(word[1:], path) for path in setup.composed.origins)
    return word.startswith("~") and not is_set


def _compare_runs(original: Original, result: RunResult) -> tuple[str, bool | None]:
    """Return the verdict on a repetition as text, and whether every bit is the same."""
    folder = original.folder
    other = result.folder
    before = original.status.digest if original.status.state == "finished" else None
    try:
        found = diff(folder, other)
    except ConfigError as error:
        return _compare_weights(original, before, result.digest, str(error))
    updates = len(found.one.ledger or ()) or result.updates
    if not found.equal and found.components[0] == LENGTH and before is None:
        text = f"bit-identical as far as {folder} went, which has not finished. {found.verdict}"
        return text, True
    if not found.equal:
        text = f"NOT bit-identical to {folder}.\n\n{found.report()}{_explain_deviations(original)}"
        return text, False
    if before is not None and before != result.digest:
        return (
            f"NOT bit-identical to {folder}: {updates} updates and all measured values are equal, "
            f"but the final weights differ: sha256 {before} there, {result.digest} in {other}"
            f"{_explain_deviations(original)}",
            False,
        )
    lines = len(found.one.metrics)
    weights = "which has not finished: "
    if before:
        weights = f"weights sha256 {result.digest}, "
    return (
        f"bit-identical to {folder}: {weights}{updates} updates, {lines} lines of metrics.jsonl",
        True,
    )


def _compare_weights(
    original: Original, before: Any, digest: str, reason: str
) -> tuple[str, bool | None]:
    folder = original.folder
    if before is None:
        return f"{folder} cannot be compared: {reason}", None
    if before == digest:
        text = f"the weights are bit-identical to {folder}, sha256 {digest}; nothing else was kept"
        return text, True
    text = f"NOT bit-identical to {folder}: weights sha256 {before} there, {digest} here"
    return f"{text}{_explain_deviations(original)}", False


def _explain_deviations(original: Original) -> str:
    """Return how the original differs from a run of its command alone, or an empty text."""
    if not original.deviations:
        return ""
    head = "\n\nThis was to be expected. The original differs from a run of its command alone:\n"
    return head + "\n".join(f"  {line}" for line in original.deviations)


def _check_comparable(original: Original) -> None:
    """Reject an original that has nothing to compare a repetition with."""
    if original.status.state == "finished" and original.status.digest:
        return
    reason = ""
    try:
        side = read_side(original.folder)
        if side.ledger or side.metrics:
            return
    except ConfigError as error:
        reason = f" ({error})"
    raise ConfigError(
        f"--from {original.folder}: it has not finished, and there is no update in its {FILE} "
        f"and no line in its metrics.jsonl to compare with{reason}; resume it first: "
        f"phasetrain RUN.dir={original.folder}, with the words in its overrides.yaml",
        code="rerun.nothing_to_compare",
    )


def _check_folder(original: str, chosen: str) -> None:
    """Reject a folder in which nothing would be trained."""
    is_same = original == chosen.rstrip("/")
    if "://" not in original + chosen:
        # Local paths may reach one folder in several ways, through links or `..`.
        is_same = Path(original).resolve() == Path(chosen).resolve()
    if not is_same and not _has_finished(chosen):
        return
    why = "is the folder of the original" if is_same else "contains a run that has finished"
    raise ConfigError(
        f"--from {original} and RUN.dir = {chosen!r}: this {why}, so nothing would be "
        f"repeated; give another folder, or remove RUN.dir for {_find_free_folder(original)}",
        code="rerun.same_folder",
    )


def _restore_word(change: Change, config: Mapping[str, Any]) -> str:
    """Return the override that restores the value that a path has in a config, or removes it."""
    path = change.path
    value = change.old
    if value is ABSENT:
        path, value = _absent_override(config, path)
    if value is ABSENT:
        return f"~{path}"
    return f"{path}={format_literal(value, path)}"


def _absent_override(config: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """Return path and value of an override that removes `path`.

    A labelled entry is set to null; otherwise it is the first prefix of `path` that the config does
    not have, or that is no mapping in it.
    """
    if part_pattern(path) in LABELS:
        return path, None
    node: Any = config
    names = path.split(".")
    for depth, name in enumerate(names, 1):
        node = node.get(name, ABSENT)
        if not isinstance(node, Mapping):
            return ".".join(names[:depth]), node
    raise AssertionError("the config has no value at the path")


def _list_changes(original: Original, setup: Setup) -> list[Change]:
    """Return the differences between the config of the original and the same one composed now."""
    given = setup.composed.config
    before = without_derived(dict(original.config), given)
    now = without_derived(setup.config.plain(), given)
    return compare_configs(before, now, classify_hooks(setup.schema, before, now))


def _find_free_folder(folder: str) -> str:
    """Return the first folder name for a repetition that holds no finished run."""
    names = chain([f"{folder}-again"], (f"{folder}-again-{number}" for number in count(2)))
    return next(name for name in names if not _has_finished(name))


def _has_finished(folder: str) -> bool:
    return read_status(folder).state == "finished"


def _find_file(word: str, folder: str) -> str:
    """Return an override; the path of an experiment file that is not here begins at `folder`."""
    if is_file_word(word) and not Path(word).exists():
        return str(Path(folder, word))
    return word


def _covers(key: str, path: str) -> bool:
    """Return whether an override of `key` sets `path`; another experiment sets every path."""
    return key == EXPERIMENT or path == key or path.startswith(f"{key}.")


def _read_yaml(storage: Storage, path: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(storage.read(path).decode()))
    # RecursionError: a deeply nested file exhausts the stack of the parser
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, YAMLError, RecursionError):
        return None
