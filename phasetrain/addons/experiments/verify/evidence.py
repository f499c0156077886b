"""Checks of a run that need no training: the chain of the ledger, the roots in checkpoints and
their digests."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phasetrain.checkpoint.commit import (
    MANIFEST,
    SHARDED,
    Saved,
    list_checkpoints,
    read_file,
    verify_file,
)
from phasetrain.checkpoint.promised import FOLDER
from phasetrain.checkpoint.reader import PROMISED
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ConfigError, InvalidCheckpointError
from phasetrain.runs.ledger import FILE, InvalidLedgerError, Ledger
from phasetrain.runs.view import CONFIG, RunView
from phasetrain.runtime.format import format_count
from phasetrain.runtime.storage import Storage


@dataclass(frozen=True)
class Finding:
    """Something that is not as the run recorded it.

    Attributes:
        subject: `chain`, `checkpoint`, `weights`, `update` or `status`.
        update: the update it is about; of a checkpoint, the updates before it.
        components: the components that differ there, causes before effects.
        text: a sentence.
    """

    subject: str
    update: int
    components: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Evidence:
    """The files of a run that verify each other.

    Attributes:
        folder: the run folder.
        storage: access to it.
        ledger: its ledger.
        saved: intact checkpoints, oldest first.
        findings: files and records that do not fit together.
        notes: parts of the run that cannot be verified, and why.
    """

    folder: str
    storage: Storage
    ledger: Ledger
    saved: tuple[Saved, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def last(self) -> int:
        """The last update of the run."""
        return max([self.ledger.last, *(count_updates(checkpoint) for checkpoint in self.saved)])

    @property
    def root(self) -> str:
        """The root of the whole ledger; empty without a chain."""
        return self.ledger.root_at(self.ledger.last)

    def path_of(self, saved: Saved) -> str:
        """Return the path of a checkpoint."""
        return f"{self.folder}/{FOLDER}/{saved.name}"


def count_updates(saved: Saved) -> int:
    """Return the number of updates before a checkpoint."""
    return int(saved.manifest.state["updates"])


def gather_evidence(folder: str, storage: Storage) -> Evidence:
    """Read the ledger and the checkpoints of a run, and check that they fit together.

    Raises:
        ConfigError: there is no ledger, or one of a later version.
    """
    root = f"{folder}/{FOLDER}"
    # The checkpoints first: a run that is training writes its records before it saves.
    saved, rejected = list_checkpoints(storage, root)
    _check_versions(storage, root, rejected)
    findings = [
        Finding("checkpoint", 0, ("manifest",), f"checkpoint {name} is not intact: {reason}")
        for name, reason in rejected.items()
    ]
    intact = []
    for checkpoint in saved:
        problem = _find_damage(storage, root, checkpoint)
        if problem is None:
            continue
        component = "files"
        if not problem:
            component, problem = "promise", _find_malformed_entry(storage, root, checkpoint)
        if problem:
            text = f"checkpoint {checkpoint.name} is not intact: {problem}"
            findings.append(Finding("checkpoint", count_updates(checkpoint), (component,), text))
        else:
            intact.append(checkpoint)
    ledger = read_ledger(folder, storage)
    findings += _check_chain(ledger)
    findings += _check_roots(ledger, intact)
    notes = tuple(_list_gaps(ledger, intact))
    return Evidence(folder, storage, ledger, tuple(intact), tuple(findings), notes)


def read_ledger(folder: str, storage: Storage) -> Ledger:
    """Return the ledger of a run folder.

    Raises:
        ConfigError: there is none (code `verify.no_ledger`), or it cannot be read (code
            `verify.other_version`).
    """
    names = storage.list_names(folder)
    if not {FILE, CONFIG} & set(names):
        raise ConfigError(
            f"{folder!r}: expected the folder of a run; it has neither {FILE} nor {CONFIG}",
            code="run.not_found",
        )
    try:
        ledger = RunView(folder, storage).ledger
    except InvalidLedgerError as error:
        raise ConfigError(
            f"{folder!r}: {error}; verify it with the version of phasetrain that made it",
            code="verify.other_version",
        ) from error
    if ledger is None:
        raise ConfigError(
            f"{folder!r}: it has no {FILE} (HOOKS.ledger = null) to compare it "
            f"with; repeat the whole run instead: phasetrain rerun {folder}",
            code="verify.no_ledger",
        )
    return ledger


def _check_versions(storage: Storage, root: str, names: Iterable[str]) -> None:
    """Raise ConfigError if a checkpoint that cannot be read is of a later version."""
    # A manifest of a later format counts as unreadable, which would look like damage.
    for name in names:
        content = storage.read_json(f"{root}/{name}/{MANIFEST}")
        # By hand, since a damaged manifest may hold any JSON value.
        if not isinstance(content, dict) or not isinstance(content.get("body"), dict):
            continue
        version = content["body"].get("format")
        if isinstance(version, int) and version > SHARDED:
            raise ConfigError(
                f"{root}/{name}: it has format {version}, this version of phasetrain reads up to "
                f"{SHARDED}; verify the run with the version that made it",
                code="verify.other_version",
            )


def _find_damage(storage: Storage, root: str, saved: Saved) -> str | None:
    """Return the first problem with the files of a checkpoint, or an empty text; None if the
    checkpoint has been deleted meanwhile."""
    try:
        for name, record in saved.manifest.files.items():
            verify_file(storage, f"{root}/{saved.name}", name, record, "full")
    except InvalidCheckpointError as error:
        # A run that is training deletes old checkpoints.
        if saved.name not in storage.list_names(root):
            return None
        return str(error)
    return ""


def _find_malformed_entry(storage: Storage, root: str, saved: Saved) -> str:
    """Return which entry of the promise of a checkpoint is malformed; empty if none is."""
    record = saved.manifest.files.get(PROMISED)
    if record is None:  # format 1 has no file of its own for it
        return ""
    content = read_file(storage, f"{root}/{saved.name}", PROMISED, record, "full")
    try:
        promised = json.loads(content)
        mappings = [promised[name] for name in ("config", "data", "environment")]
        mappings += [promised.get(name, {}) for name in ("packages", "platform")]
        decode_plan(promised["plan"])
        int(promised["environment"]["threads"])
        list(promised.get("observers", ()))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return f"{PROMISED} is malformed ({error!r})"
    if not all(isinstance(entry, dict) for entry in mappings):
        return f"{PROMISED} is malformed"
    return ""


def _check_chain(ledger: Ledger) -> Iterator[Finding]:
    if ledger.damaged:
        update = ledger.damaged[0] + 1
        text = (
            f"{format_count(len(ledger.damaged), 'record')} of the ledger are damaged, the first "
            f"one at position {update}"
        )
        yield Finding("chain", update, ("checksum",), text)
        # A damaged record breaks the chain as well, which says nothing more.
        return
    broken = ledger.find_broken_link()
    if broken is not None:
        text = (
            f"the chain of the ledger is broken at update {broken}: this record, or the one before "
            "it, is not the one that was written"
        )
        yield Finding("chain", broken, ("hash",), text)


def _check_roots(ledger: Ledger, saved: list[Saved]) -> Iterator[Finding]:
    for checkpoint in saved:
        # Empty if the attempt that saved it had no ledger, or one of version 1.
        root = checkpoint.manifest.facts.ledger
        updates = count_updates(checkpoint)
        if root and root != ledger.root_at(updates):
            text = (
                f"checkpoint {checkpoint.name} was saved with another ledger: its root of update "
                f"{updates} is {root}, the ledger has {ledger.root_at(updates) or 'none'}; the "
                "ledger was rewritten, or lost records"
            )
            yield Finding("chain", updates, ("root",), text)


def _list_gaps(ledger: Ledger, saved: list[Saved]) -> Iterator[str]:
    if not ledger.header.is_chained:
        yield (
            "the ledger is of version 1, which has no hash chain: a record could be changed alone"
        )
    missing = ledger.last - len(ledger)
    if missing:
        yield (
            f"{format_count(missing, 'update')} up to update {ledger.last} are not in the ledger, "
            "and cannot be compared one by one"
        )
    if not saved:
        yield (
            "no checkpoint is kept, so the run can only be trained again from its start; keep "
            "checkpoints with CHECKPOINT.keep_every.epochs=1 (or keep_every.updates)"
        )
