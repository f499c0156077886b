"""Makes a run folder from a checkpoint of another run and its logs up to there."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import torch

from phasetrain.app.setup import Setup
from phasetrain.app.train.resume import list_packages
from phasetrain.checkpoint.codec import assemble_state
from phasetrain.checkpoint.commit import (
    Manifest,
    Saved,
    commit,
    delete_checkpoint,
    delete_leftovers,
    list_checkpoints,
    read_file,
)
from phasetrain.checkpoint.contents import FORK
from phasetrain.checkpoint.reader import PROMISED, TREE, parse_json
from phasetrain.engine.plan import START
from phasetrain.engine.position import COMPLETED
from phasetrain.engine.repeats import decode_plan
from phasetrain.errors import ConfigError, InvalidCheckpointError
from phasetrain.hooks.observers import list_observers
from phasetrain.runs.ledger import FILE, InvalidLedgerError, LedgerHeader
from phasetrain.runs.paths import check_run_folder
from phasetrain.runs.records import METRICS, PLAN, PREDICTIONS, STATUS
from phasetrain.runtime.redaction import Redaction
from phasetrain.runtime.storage import FileRecord, Storage, open_storage

LOG_FOLDERS = ("csv", "tensorboard")
"""Folders with logs of hooks, which a resume truncates to what its checkpoint covers."""


@dataclass(frozen=True)
class RunStorage:
    """A run folder and access to its files."""

    folder: str
    storage: Storage

    @classmethod
    def open(cls, folder: str) -> "RunStorage":
        """Return the access to the run folder at a path."""
        path = folder.rstrip("/")
        return cls(path, open_storage(path))

    @property
    def checkpoints(self) -> str:
        """The folder of the checkpoints."""
        return f"{self.folder}/checkpoints"

    def list_checkpoints(self) -> list[Saved]:
        """Return the checkpoints with readable manifests, oldest first."""
        return list_checkpoints(self.storage, self.checkpoints)[0]

    def read_part(self, saved: Saved, name: str) -> bytearray:
        """Return a verified file of a checkpoint."""
        path = f"{self.checkpoints}/{saved.name}"
        return read_file(self.storage, path, name, saved.manifest.files[name], "full")

    def read_promise(self, saved: Saved) -> dict[str, Any]:
        """Return the promise of a checkpoint."""
        if PROMISED not in saved.manifest.files:
            raise _other_version(self.folder, "a release before 0.2 has written it")
        content: dict[str, Any] = parse_json(self.read_part(saved, PROMISED))
        return content


def fork_run(source: str, update: int, target: str, *, setup: Setup | None = None) -> str:
    """Make a run folder from the checkpoint of another run after an update, and its logs up to it.

    A resume in the new folder gives exactly the folder of a run from scratch, if its config only
    differs in keys that have no effect before that checkpoint. Of several checkpoints after the
    same update the newest one is taken, which may follow tests. A killed fork is made again.

    Args:
        source: folder of the run; it is only read, and may belong to a running process.
        update: number of updates of the checkpoint.
        target: the new folder; it must not contain a run.
        setup: the config of the new run, with which later commands are compared as usual. Without
            it the first command in the new folder may have any config, and the caller answers for
            it.

    Returns:
        Path of the checkpoint in the new folder.

    Raises:
        ConfigError: there is no usable checkpoint after that update (code `fork.no_checkpoint`), a
            hook has ended the run there (`fork.ended`), its plan was changed by RUN.allow
            (`fork.plan_changed`), another version has written it (`fork.other_version`), or there
            is a run in the new folder (`fork.target_not_empty`).
    """
    source_run = RunStorage.open(source)
    target_run = RunStorage.open(target)
    check_run_folder(source_run.folder, source_run.storage)
    checkpoints = source_run.list_checkpoints()
    last = _choose_checkpoint(source_run.folder, checkpoints, update)
    try:
        promise = source_run.read_promise(last)
        _check_promise(source_run.folder, promise)
        _clear_target(source_run, target_run)
        # The logs first: a folder counts as a run as soon as it has a checkpoint.
        _copy_logs(source_run, target_run, last, promise)
        run = uuid4().hex
        # The earlier ones too: one of them may be the best by a metric.
        for saved in (
            saved for saved in checkpoints if saved.manifest.order <= last.manifest.order
        ):
            copied = _copy_checkpoint(source_run, target_run, saved, run, setup)
    except InvalidCheckpointError as error:
        raise ConfigError(
            f"{source_run.folder!r}: the checkpoint after update {update} cannot be forked: "
            f"{error}; choose another update",
            code="fork.no_checkpoint",
        ) from error
    return f"{target_run.checkpoints}/{copied.name}"


def list_fork_updates(source: str) -> list[int]:
    """Return the numbers of updates after which a run has a checkpoint that `fork_run` takes, in
    ascending order."""
    return _list_usable_updates(RunStorage.open(source).list_checkpoints())


def _list_usable_updates(checkpoints: Sequence[Saved]) -> list[int]:
    usable = filter(_is_usable, checkpoints)
    return sorted({int(saved.manifest.state["updates"]) for saved in usable})


def _choose_checkpoint(source: str, checkpoints: Sequence[Saved], update: int) -> Saved:
    fitting = [saved for saved in checkpoints if saved.manifest.state["updates"] == update]
    usable = list(filter(_is_usable, fitting))
    # Stable: an unfinished checkpoint comes after the one of a run that has finished there.
    usable.sort(key=lambda saved: not saved.manifest.state["finished"])
    if usable:
        return usable[-1]
    if fitting and fitting[-1].manifest.facts.healthy:
        raise ConfigError(
            f"{source!r}: a hook ended the run after update {update} "
            f"({fitting[-1].manifest.state['finished']}), and a fork would end there, too; fork it "
            "at an earlier update",
            code="fork.ended",
        )
    listed = ", ".join(map(str, _list_usable_updates(checkpoints))) or "none"
    raise ConfigError(
        f"{source!r}: there is no usable checkpoint after update {update}; expected one of: "
        f"{listed}. CHECKPOINT.keep_every.updates keeps more of them, and RUN.pause_at makes one",
        code="fork.no_checkpoint",
    )


def _is_usable(saved: Saved) -> bool:
    manifest = saved.manifest
    return manifest.facts.healthy and manifest.state["finished"] in ("", COMPLETED)


def _check_promise(source: str, promise: Mapping[str, Any]) -> None:
    now = list_packages()
    before = promise.get("packages", {})
    changed = [
        f"{name} {before.get(name)} -> {version}"
        for name, version in now.items()
        if before.get(name) != version
    ]
    if changed:
        raise _other_version(source, ", ".join(changed))
    if decode_plan(promise["plan"]).anchor != START:
        raise ConfigError(
            f"{source!r}: its plan was changed by RUN.allow, so it is not the run of one config; "
            "fork a run that was not changed",
            code="fork.plan_changed",
        )


def _other_version(source: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{source!r} was trained by other versions ({reason}), and a fork has equal bits with "
        "equal versions only; repeat it with the present ones, or install those",
        code="fork.other_version",
    )


def _clear_target(source: RunStorage, target: RunStorage) -> None:
    """Remove the remains of a fork that was killed from the new folder."""
    checkpoints = target.list_checkpoints()
    is_run = target.storage.exists(f"{target.folder}/{STATUS}")
    if is_run or any(FORK not in target.read_promise(saved) for saved in checkpoints):
        raise ConfigError(
            f"{target.folder!r} contains a run, and a fork of {source.folder!r} needs a new "
            "folder; name another one",
            code="fork.target_not_empty",
        )
    for saved in checkpoints:
        delete_checkpoint(target.storage, target.checkpoints, saved.name)
    if target.storage.exists(target.checkpoints):
        delete_leftovers(target.storage, target.checkpoints)


def _copy_logs(
    source: RunStorage, target: RunStorage, saved: Saved, promise: Mapping[str, Any]
) -> None:
    """Copy the logs of a run up to a checkpoint."""
    target.storage.make_folder(target.folder)
    names = [METRICS, FILE, PLAN, PREDICTIONS]
    for folder in LOG_FOLDERS:
        if source.storage.exists(f"{source.folder}/{folder}"):
            target.storage.make_folder(f"{target.folder}/{folder}")
            files = source.storage.list_names(f"{source.folder}/{folder}")
            names += [f"{folder}/{name}" for name in files]
    metrics_end = _find_metrics_end(source, saved, promise)
    for name in names:
        if not source.storage.exists(f"{source.folder}/{name}"):
            continue
        content = source.storage.read(f"{source.folder}/{name}")
        if name == METRICS:
            content = content[:metrics_end]
        elif name == FILE:
            content = content[: _find_ledger_end(content, int(saved.manifest.state["updates"]))]
        target.storage.replace(f"{target.folder}/{name}", content)


def _find_ledger_end(content: bytes, updates: int) -> int:
    """Return the bytes of steps.ledger that hold the first updates."""
    try:
        header = LedgerHeader.decode(content)
    except InvalidLedgerError:
        return 0  # the resume begins the file again, as after any damage
    return header.size + header.record_bytes * updates


def _find_metrics_end(source: RunStorage, saved: Saved, promise: Mapping[str, Any]) -> int | None:
    """Return the bytes of metrics.jsonl that a checkpoint covers; None without that hook."""
    # The tensors of the state are not needed, and are read with the files later. Two entries, so
    # that they can be a complex number.
    tensors: dict[str, torch.Tensor] = defaultdict(lambda: torch.empty(2))
    state = assemble_state(source.read_part(saved, TREE), tensors)
    for label, section in promise["config"].get("HOOKS", {}).items():
        if (section or {}).get("name", label) == "metrics" and label in state["hooks"]:
            return int(state["hooks"][label]["offset"])
    return None


def _copy_checkpoint(
    source: RunStorage, target: RunStorage, saved: Saved, run: str, setup: Setup | None
) -> Saved:
    """Copy a checkpoint of another run as one of this run, which is not yet finished."""
    before = saved.manifest
    promise = source.read_promise(saved)
    promise[FORK] = {
        "run": before.run,
        "update": int(before.state["updates"]),
        "adopts": setup is None,
    }
    if setup is not None:
        promise["config"] = Redaction({}).redact_config(setup.asked)
        promise["observers"] = list(list_observers(setup.asked))
    # Each file is verified as it is read: a damaged one would get a new and valid digest.
    contents: dict[str, bytes | bytearray] = {
        name: source.read_part(saved, name) for name in before.files if name != PROMISED
    }
    contents[PROMISED] = json.dumps(promise).encode()

    def describe(files: dict[str, FileRecord]) -> Manifest:
        # The new run may be longer, and a finished one would end at once.
        state = {**before.state, "finished": ""}
        return replace(before, run=run, parent=None, state=state, files=files)

    target.storage.make_folder(target.checkpoints)
    return commit(target.storage, target.checkpoints, contents, describe)
