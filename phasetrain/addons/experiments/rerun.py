"""Repeat a run from its folder in a new one, and check that every bit is the same
(`phasetrain rerun FOLDER`)."""

import io
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.compare.diff import LENGTH, diff, read_side
from phasetrain.app.engines import require_ranks
from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.app.stored.stored_config import StoredConfig, read_newest_command
from phasetrain.config.compose.merge import lookup
from phasetrain.config.compose.override_text import key_of, quote_value
from phasetrain.distributed import find_placement
from phasetrain.errors import ConfigError
from phasetrain.runs.ledger import FILE
from phasetrain.runs.records import StatusRecord
from phasetrain.runs.view import read_status
from phasetrain.runtime.terminal import Terminal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Original:
    """The run to repeat.

    Attributes:
        stored: its config.
        status: content of status.json.
    """

    stored: StoredConfig
    status: StatusRecord

    @property
    def folder(self) -> str:
        """Path of its folder."""
        return self.stored.folder

    @property
    def deviations(self) -> list[str]:
        """How it differs from a run of its command alone, see `list_deviations`."""
        # the name of the key in existing run folders
        return self.stored.environment.deviations


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
    run: Callable[[Sequence[str], StoredConfig], RunResult],
    trust: bool = False,
) -> Verdict:
    """Repeat a run in a new folder, and return the verdict.

    The config and the number of threads are taken from the newest attempt of the original.

    Args:
        folder: folder of the original.
        overrides: changes of its config; RUN.dir is `FOLDER-again` by default.
        run: runs overrides as changes of a stored config.
        trust: run the code that the config of the original names.

    Raises:
        ConfigError: the folder contains no run that can be repeated, RUN.dir is a folder in which
            nothing would be trained, or the config names code that is not trusted.
        RanksNeededError: LAUNCH.processes asks for ranks, which the command line starts.
    """
    original = read_original(folder, trust=trust)
    # before the repetition, which may take as long as the original
    _check_comparable(original)
    words = repeat_overrides(original, overrides)
    require_ranks(resolve_repetition(original, words))
    result = run(words, original.stored)
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


def read_original(folder: str, *, trust: bool = False) -> Original:
    """Read the files that describe how a run was started.

    Raises:
        ConfigError: config.yaml is not there, or broken.
    """
    try:
        stored = read_newest_command(folder)
    except ConfigError as error:
        raise ConfigError(str(error), code="rerun.no_run") from error
    return Original(replace(stored, is_trusted=trust), read_status(stored.folder))


def repeat_overrides(
    original: Original, overrides: Sequence[str] = (), *, suffix: str = "again"
) -> list[str]:
    """Return the overrides of the repetition, as changes of the config of the original.

    Args:
        original: the run to repeat.
        overrides: changes of its config.
        suffix: appended to the name of the folder in the default of RUN.dir.
    """
    words = []
    new = {key_of(word) for word in overrides}
    environment = original.stored.environment
    processes = environment.content.get("processes")
    # The number of threads is part of the bits, and its default depends on the machine.
    if lookup(original.stored.values, "MACHINE.threads") is None and environment.threads:
        words.append(f"MACHINE.threads={environment.threads}")
    setup = resolve_repetition(original, [*words, *overrides])
    if setup.config.RUN.engine != "train":
        raise ConfigError(
            f"{original.folder} and RUN.engine = {setup.config.RUN.engine!r}: only a "
            "training can be repeated; remove RUN.engine",
            code="cli.conflict",
        )
    if "RUN.dir" in new:
        _check_folder(original.folder, setup.config.RUN.dir, suffix)
    for line in original.deviations:
        log.warning(
            "%s differs from a run of its command alone, and the repetition may differ from it: %s",
            original.folder,
            line,
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
        words.append(f"RUN.dir={quote_value(_find_free_folder(original.folder, suffix))}")
    return [*words, *overrides]


def resolve_repetition(original: Original, words: Sequence[str]) -> Setup:
    """Return the config of a repetition."""
    return resolve_config(
        words,
        stored=original.stored,
        terminal=Terminal(io.StringIO(), live=False),  # the repetition itself prints these notes
        place=find_placement(os.environ),
    )


def _compare_runs(original: Original, result: RunResult) -> tuple[str, bool | None]:
    """Return the verdict on a repetition as text, and whether every bit is the same."""
    folder = original.folder
    other = result.folder
    before = original.status.digest if original.status.state == "finished" else None
    try:
        compared = diff(folder, other)
    except ConfigError as error:
        return _compare_weights(original, before, result.digest, str(error))
    updates = len(compared.one.ledger or ()) or result.updates
    if not compared.equal and compared.components[0] == LENGTH and before is None:
        text = f"bit-identical as far as {folder} went, which has not finished. {compared.verdict}"
        return text, True
    if not compared.equal:
        report = f"{compared.report()}{_explain_deviations(original)}"
        return f"NOT bit-identical to {folder}.\n\n{report}", False
    if before is not None and before != result.digest:
        return (
            f"NOT bit-identical to {folder}: {updates} updates and all measured values are equal, "
            f"but the final weights differ: sha256 {before} there, {result.digest} in {other}"
            f"{_explain_deviations(original)}",
            False,
        )
    lines = len(compared.one.metrics)
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
        f"{original.folder}: the run has not finished, and there is no update in its {FILE} "
        f"and no line in its metrics.jsonl to compare with{reason}; resume it first: "
        f"phasetrain resume {original.folder}",
        code="rerun.nothing_to_compare",
    )


def _check_folder(original: str, chosen: str, suffix: str) -> None:
    """Reject a folder in which nothing would be trained."""
    is_same = original == chosen.rstrip("/")
    if "://" not in original + chosen:
        # Local paths may reach one folder in several ways, through links or `..`.
        is_same = Path(original).resolve() == Path(chosen).resolve()
    if not is_same and not _has_finished(chosen):
        return
    why = "is the folder of the original" if is_same else "contains a run that has finished"
    raise ConfigError(
        f"{original} and RUN.dir = {chosen!r}: this {why}, so nothing would be "
        f"repeated; give another folder, or remove RUN.dir for "
        f"{_find_free_folder(original, suffix)}",
        code="rerun.same_folder",
    )


def _find_free_folder(folder: str, suffix: str) -> str:
    """Return the first folder name for a repetition that holds no finished run."""
    first = f"{folder}-{suffix}"
    names = chain([first], (f"{first}-{number}" for number in count(2)))
    return next(name for name in names if not _has_finished(name))


def _has_finished(folder: str) -> bool:
    return read_status(folder).state == "finished"
