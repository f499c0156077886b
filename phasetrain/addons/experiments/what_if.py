"""Trains a run again with a change, from the last checkpoint before the first update that changes
(`phasetrain rerun RUN --without IDS`, `--set KEY=VALUE --from-update K`, `--keep-until K`)."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phasetrain import __version__
from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.fork.first_difference import RunDifference, find_first_difference
from phasetrain.addons.experiments.fork.fork_run import fork_run, list_fork_updates
from phasetrain.addons.experiments.options import Question
from phasetrain.addons.experiments.rerun import (
    Original,
    read_original,
    repeat_overrides,
    resolve_repetition,
)
from phasetrain.app.engines import require_ranks
from phasetrain.app.result import RunResult
from phasetrain.app.setup import Setup
from phasetrain.app.stored.stored_config import StoredConfig
from phasetrain.checkpoint.promised import read_promised
from phasetrain.config.compose.merge import lookup
from phasetrain.config.compose.override_text import format_literal, key_of
from phasetrain.config.stages import LENGTHS
from phasetrain.data.samplers.excluded import ExcludedSamples
from phasetrain.distributed import find_placement
from phasetrain.engine.plan import TRAIN
from phasetrain.errors import ConfigError
from phasetrain.runs.history import read_history
from phasetrain.runtime.format import format_count, format_percent
from phasetrain.runtime.storage import open_storage
from phasetrain.tasks.build.data_builder import WITHOUT

log = logging.getLogger(__name__)

RECEIPT = "what_if.json"
RECEIPT_TEXT = "what_if.txt"
"""Files of the receipt in the new folder, for programs and for people."""

MAX_LISTED_METRICS = 6
"""Maximum number of metrics in the text of a receipt."""


@dataclass(frozen=True)
class Receipt:
    """The changes, the part of the run that was kept, and the digests of both models.

    Attributes:
        original: folder of the original.
        folder: folder of the new run.
        original_digest, digest: SHA-256 of the final weights of both.
        changes: overrides that make the change; a run from scratch with them has the same digest.
        excluded: number of samples that the new run excludes.
        excluded_digest: SHA-256 of their ids; empty without.
        dataset: fingerprint of the training data.
        shared_updates: updates that the two runs certainly have in common.
        reason: the key that ends this, and why.
        started_from: update whose checkpoint the new run began with; 0 from scratch.
        updates: updates of the new run.
        original_metrics, metrics: last value of each metric of both runs.
        is_same_run: whether nothing changes, so that the digests have to be equal.
        version: version of phasetrain.
    """

    original: str
    folder: str
    original_digest: str
    digest: str
    changes: tuple[str, ...]
    excluded: int
    excluded_digest: str
    dataset: str
    shared_updates: int
    reason: str
    started_from: int
    updates: int
    original_metrics: Mapping[str, float]
    metrics: Mapping[str, float]
    is_same_run: bool
    version: str = __version__

    @property
    def exit_code(self) -> int:
        """0, or 1 if nothing changes and the digests differ all the same."""
        return int(self.is_same_run and self.digest != self.original_digest)

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as JSON data."""
        return {**asdict(self), "saved_updates": self.started_from}

    def to_text(self) -> str:
        """Return the receipt for people, at most 20 lines."""
        same = "the same" if self.digest == self.original_digest else "another model"
        first = f"{self.shared_updates + 1}"
        if self.is_same_run:
            first = "none"
        saved = format_percent(self.started_from / self.updates) if self.updates else "0 %"
        rows = [
            ("original", self.original),
            ("new run", self.folder),
            ("change", " ".join(self.changes) or "none"),
            ("first update that can change", first + (f" ({self.reason})" if self.reason else "")),
            ("started from", f"update {self.started_from} of {self.updates}, {saved} saved"),
            ("training data", self.dataset),
        ]
        if self.excluded:
            count = format_count(self.excluded, "sample")
            rows.append(("excluded", f"{count}, ids {self.excluded_digest[:16]}"))
        rows += [
            ("digest of the original", self.original_digest),
            ("digest now", f"{self.digest} ({same})"),
        ]
        for name in list(self.metrics)[:MAX_LISTED_METRICS]:
            before = self.original_metrics.get(name)
            shown = "" if before is None else f"{before:.6g} -> "
            rows.append((name, f"{shown}{self.metrics[name]:.6g}"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


@dataclass(frozen=True)
class _Prepared:
    """A changed run before it is trained."""

    words: list[str]
    changes: list[str]
    difference: RunDifference
    is_same_run: bool
    unchanged: ComparedRun
    changed: ComparedRun


def answer(
    folder: str,
    overrides: Sequence[str],
    question: Question,
    *,
    run: Callable[[Sequence[str], StoredConfig], RunResult],
    trust: bool = False,
) -> tuple[RunResult, Receipt | None]:
    """Train a run again with a change, and write the receipt into the new folder.

    Args:
        folder: folder of the original, which is only read.
        overrides: further changes of its config; RUN.dir is `FOLDER-what-if` by default.
        question: the change.
        run: runs overrides as changes of a stored config.
        trust: run the code that the config of the original names.

    Returns:
        The result, and the receipt on rank 0 if the run has finished.

    Raises:
        ConfigError: the change cannot be made exactly (codes `rerun.*`), an id is wrong
            (`data.*`), or the original cannot be forked (`fork.*`); nothing was written.
        RanksNeededError: LAUNCH.processes asks for ranks, which the command line starts; the fork
            is made.
    """
    original = read_original(folder, trust=trust)
    _check_original(original)
    prepared = _prepare(original, overrides, question)
    limit = prepared.difference.updates
    if question.keep_until is not None:
        last = prepared.unchanged.plan.updates - 1
        if not 0 <= question.keep_until <= last:
            raise ConfigError(
                f"--keep-until {question.keep_until}: expected an update from 0 to {last}, after "
                "which updates are left to train again",
                code="rerun.no_such_update",
            )
        limit = min(limit, question.keep_until)
    start = max(
        (update for update in list_fork_updates(original.folder) if update <= limit), default=0
    )
    target = str(prepared.changed.setup.config.RUN.dir)
    # Ranks are started once the fork is there, so that none of them has to wait for it.
    if find_placement(os.environ).size == 1:
        _fork(original.folder, prepared.changed.setup, start, limit)
        require_ranks(prepared.changed.setup)
    elif not list_fork_updates(target):
        start = 0  # ranks that somebody else has started, without a fork
    result = run(prepared.words, original.stored)
    # One rank writes the receipt, and a run that was stopped has none yet.
    if find_placement(os.environ).rank or result.state != "finished":
        return result, None
    receipt = _make_receipt(original, prepared, result, start)
    storage = open_storage(result.folder)
    storage.replace_json(f"{result.folder}/{RECEIPT}", receipt.to_json())
    storage.replace(f"{result.folder}/{RECEIPT_TEXT}", f"{receipt.to_text()}\n".encode())
    return result, receipt


def _check_original(original: Original) -> None:
    if original.status.state != "finished" or not original.status.digest:
        raise ConfigError(
            f"{original.folder!r}: it has not finished, so there is no model to compare with; "
            f"resume it first: phasetrain resume {original.folder}",
            code="rerun.not_finished",
        )
    if original.deviations:
        raise ConfigError(
            f"{original.folder!r}: it is not the run of one config ({original.deviations[0]}); "
            "repeat it with `phasetrain rerun`, and ask about the repetition",
            code="rerun.deviates",
        )


def _prepare(original: Original, overrides: Sequence[str], question: Question) -> _Prepared:
    """Find the words of the changed run, and how long it is the same."""
    # Threads divide a sum, so their number decides about its last bits.
    keeps = [f"MACHINE.threads={n}" for n in [original.stored.environment.threads] if n]
    unchanged = ComparedRun.open(resolve_repetition(original, keeps))
    _check_data(original.folder, unchanged)
    changes = [
        *_exclude_words(original.stored.values, question.without),
        *_stage_words(unchanged, question),
        *overrides,
    ]
    words = repeat_overrides(original, changes, suffix="what-if")
    setup = resolve_repetition(original, words)
    _check_world_size(original, setup.config)
    changed = ComparedRun.open(setup)
    difference = find_first_difference(unchanged, changed)
    # Without a key the difference is the end of both runs.
    return _Prepared(words, changes, difference, not difference.key, unchanged, changed)


def _check_data(folder: str, run: ComparedRun) -> None:
    """Reject a run whose training data has changed since."""
    promised = read_promised(folder, "latest", open_storage(folder))["data"]
    for name, split in run.data.items():
        then = promised.get(name)
        if then is not None and not split.has_fingerprint(then):
            raise ConfigError(
                f"DATA.{name.upper()}: the data has changed since {folder}: its fingerprint was "
                f"{then} and is {split.fingerprint()}; restore the data",
                code="rerun.data_changed",
            )


def _exclude_words(values: Mapping[str, Any], without: Sequence[str]) -> list[str]:
    """Return the override that excludes samples in addition to the exclusions of the original."""
    if not without:
        return []
    before = lookup(values, "DATA.TRAIN.exclude") or []
    entries: list[Any] = [before] if isinstance(before, str) else list(before)
    for word in without:
        if not word.strip():
            raise ConfigError(
                "--without: expected ids such as 3,17, or a file of them; it is empty",
                code="cli.usage",
            )
        parts = word.split(",")
        if all(part.strip().lstrip("-").isdigit() for part in parts):
            entries += map(int, parts)
        else:
            # Absolute: a resume may be started in another folder.
            entries.append(str(Path(word).absolute()))
    return [f"DATA.TRAIN.exclude={format_literal(entries, 'DATA.TRAIN.exclude')}"]


def _stage_words(run: ComparedRun, question: Question) -> list[str]:
    """Return the override that divides a run into a stage before the change and one after it."""
    start = question.from_update
    if start is None and not question.settings:
        return []
    updates = run.plan.updates
    if start is None or not question.settings:
        raise ConfigError(
            "--set and --from-update: one of them is given; expected both, such as --set "
            "OPTIMIZER.lr=0.01 --from-update 100",
            code="cli.usage",
        )
    if run.config["PHASES"]["stages"]:
        raise ConfigError(
            "--from-update: the run has PHASES.stages, which say what changes when; give the new "
            "ones as an override, PHASES.stages=[...]",
            code="rerun.has_stages",
        )
    if not 2 <= start <= updates:
        raise ConfigError(
            f"--from-update {start}: expected an update from 2 to {updates}; a change from the "
            "first update on is an override without --from-update",
            code="rerun.no_such_update",
        )
    tree: dict[str, Any] = {}
    for word in question.settings:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {word}: expected KEY=VALUE", code="cli.usage")
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    stages = [
        f"{{updates: {start - 1}}}",
        f"{{updates: {updates - start + 1}, continues: true, {_format_tree(tree)[1:]}",
    ]
    # The stages replace the length of the run, which a command from scratch sets as well.
    units = [unit for unit in LENGTHS if run.config["PHASES"][unit] is not None]
    return [*(f"PHASES.{unit}=null" for unit in units), f"PHASES.stages=[{', '.join(stages)}]"]


def _format_tree(tree: Mapping[str, Any]) -> str:
    """Return nested sections in the grammar of overrides; values are in it already."""
    entries = [
        f"{name}: {value if isinstance(value, str) else _format_tree(value)}"
        for name, value in tree.items()
    ]
    return "{" + ", ".join(entries) + "}"


def _check_world_size(original: Original, config: Mapping[str, Any]) -> None:
    """Reject a world size whose sums have other bits than the sums of the original."""
    before = original.stored.environment.content.get("processes", 1)
    placement = find_placement(os.environ)
    now = placement.size
    if now == 1 and config["LAUNCH"]["processes"]:
        now = config["LAUNCH"]["processes"]
    if now != before and config["DISTRIBUTED"]["reduction"] != "ordered":
        raise ConfigError(
            f"{original.folder!r}: it was trained with world size {before}, and this is {now}, so "
            f"not even unchanged updates would have equal bits; add LAUNCH.processes={before}",
            code="rerun.world_size",
        )


def _fork(source: str, setup: Setup, start: int, common: int) -> None:
    """Make the new folder from a checkpoint of the original.

    Args:
        source: folder of the original.
        setup: the new run.
        start: updates of the checkpoint; 0: there is none to start from.
        common: updates after which the two runs can differ.
    """
    if not common:
        log.info("already the first update can change: the new run starts from scratch")
        return
    if not start:
        log.warning(
            "%s has no checkpoint of the first %d updates, which both runs have in common; the new "
            "run starts from scratch. A smaller CHECKPOINT.keep_every.updates keeps more of them",
            source,
            common,
        )
        return
    target = str(setup.config.RUN.dir)
    try:
        fork_run(source, start, target, setup=setup)
    except ConfigError as error:
        # This command was killed and is started again; the resume compares the configs.
        if error.code != "fork.target_not_empty":
            raise
        log.info("%s has begun already and is resumed", target)


def _make_receipt(
    original: Original, prepared: _Prepared, result: RunResult, started_from: int
) -> Receipt:
    split = prepared.changed.data[TRAIN]
    difference = prepared.difference
    excluded = ExcludedSamples(split.excluded_ids)
    return Receipt(
        original=original.folder,
        folder=result.folder,
        original_digest=original.status.digest,
        digest=result.digest,
        changes=tuple(word for word in prepared.changes if key_of(word) != "RUN.dir"),
        excluded=len(excluded),
        excluded_digest=excluded.digest() if len(excluded) else "",
        dataset=split.fingerprint().partition(WITHOUT)[0],
        shared_updates=difference.updates,
        reason=difference.key,
        started_from=started_from,
        updates=result.updates,
        original_metrics=read_history(original.folder).last,
        metrics=read_history(result.folder).last,
        is_same_run=prepared.is_same_run,
    )
