"""The config that a run folder or a checkpoint has recorded.

`resolve_config(changes, stored=...)` composes it with changes, so that a command needs the folder
alone: no experiment, no folder of configs, none of the words that started the run.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.promised import checkpoint_root, read_promised
from phasetrain.config.compose.folders import is_file_word, list_file_folders
from phasetrain.config.compose.merge import lookup
from phasetrain.config.compose.override_text import format_literal, key_of, quote_value
from phasetrain.config.nested import leaves
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError
from phasetrain.runs.paths import check_run_folder
from phasetrain.runs.records import EnvironmentRecord
from phasetrain.runs.view import CONFIG, RunView
from phasetrain.runtime.redaction import restore_secrets
from phasetrain.runtime.storage import Storage, open_storage

ESSENTIAL = ("RUN", "DATA", "MODEL", "OPTIMIZER")
"""Sections in the config of every run."""

OF_FOLDER = ("RUN.dir", "RUN.engine", "RUN.checkpoint")
"""Keys that a command on a folder sets, see `use_folder`."""

WITHOUT_CHECKPOINT = ("train", "plan", "replay")
"""Values of RUN.engine that work on the config of the newest attempt; a run that saved nothing has
one as well."""


@dataclass(frozen=True)
class StoredConfig:
    """The config of a run or of a checkpoint, to compose with changes.

    Attributes:
        path: run folder or checkpoint, as the user named it.
        values: every key; null where a rule derived the value, so that it is derived again.
        folder: the run folder; a checkpoint may have been copied out of its run folder.
        overrides: overrides of the newest command, without keys of RUN that belong to one command.
        environment: content of environment.json.
        allowed: RUN.allow of the newest command.
        is_trusted: whether the user trusts all code that the config names.
        changes: overrides with which the config was resolved.
        trusted_names: modules and dotted paths that the user trusts.
    """

    path: str
    values: Mapping[str, Any]
    folder: str
    overrides: tuple[str, ...] = ()
    environment: EnvironmentRecord = field(default_factory=EnvironmentRecord)
    allowed: tuple[str, ...] = ()
    is_trusted: bool = False
    changes: tuple[str, ...] = ()
    trusted_names: frozenset[str] = frozenset()

    @property
    def config_dir(self) -> str | None:
        """The folder of configs that the run was started with, if it was."""
        return self.environment.config_dir or None

    @property
    def code_folders(self) -> tuple[str, ...]:
        """The folders in which modules of the run may be: the working directory of its newest
        attempt, and the folder of the YAML file that it was started with."""
        folders = (self.environment.folder, *list_file_folders(self.overrides))
        return tuple(folder for folder in folders if folder)

    def find_config_dir(self) -> str | None:
        """Return the folder of configs if it exists on this machine."""
        if self.config_dir and Path(self.config_dir).is_dir():
            return self.config_dir
        return None

    def record_overrides(self, changes: Sequence[str]) -> tuple[str, ...]:
        """Return the overrides that are equivalent to this config with changes, for the records of
        the run: the overrides of its command, followed by the changes."""
        new = [word for word in changes if key_of(word) not in OF_FOLDER]
        chosen = {key_of(word) for word in new}
        # A key that is set again, or a group that is selected now (`LOSS=focal`), replaces what
        # earlier words have set.
        kept = [
            word
            for word in self.overrides
            if chosen.isdisjoint((key_of(word), key_of(word).partition(".")[0]))
        ]
        last = [word for word in changes if key_of(word) == "RUN.dir"][-1:]
        return (*kept, *new, *last)


def use_folder(
    folder: str, engine: str, changes: Sequence[str] = (), checkpoint: str = "", *, trust: bool
) -> tuple[StoredConfig, list[str]]:
    """Return the config of a folder, and the overrides with which an engine works on the folder.

    A training resumes with the config of the newest attempt, and without changes with its consents
    (RUN.allow) as well. Tests and extractions take the config with which the checkpoint was saved,
    and run in this process instead of a job.

    Args:
        folder: folder of a run, or for other engines than `train` of one checkpoint.
        engine: value of RUN.engine.
        changes: overrides of the user.
        checkpoint: value of RUN.checkpoint; empty for the default.
        trust: whether the user trusts the code that the folder names.

    Raises:
        ConfigError: there is no such run or checkpoint, or the changes set RUN.dir.
    """
    keys = {key_of(word) for word in changes}
    if "RUN.dir" in keys:
        raise ConfigError(
            f"RUN.dir and the folder {folder!r}: the command works on the folder that it names; "
            "remove one of the two",
            code="cli.conflict",
        )
    words = []
    if engine in WITHOUT_CHECKPOINT:
        stored = read_newest_command(folder)
        if engine == "train" and stored.allowed and not changes:
            words.append(f"RUN.allow={format_literal(stored.allowed, 'RUN.allow')}")
    else:
        named = "latest" if checkpoint in ("", "none") else checkpoint
        stored = read_checkpoint_config(folder, named)
        # A test of a few seconds does not wait in the queue of the training.
        if "LAUNCH.cluster" not in keys:
            words.append("LAUNCH.cluster=null")
        if stored.folder != stored.path:  # the folder is a checkpoint
            checkpoint = checkpoint or stored.path
        if checkpoint:
            words.append(f"RUN.checkpoint={quote_value(checkpoint)}")
    own = [f"RUN.dir={quote_value(stored.folder)}", f"RUN.engine={engine}"]
    return replace(stored, is_trusted=trust), [*own, *words, *changes]


def read_newest_command(folder: str) -> StoredConfig:
    """Return the config of the newest attempt of a run, to resume or repeat it.

    Raises:
        ConfigError: the folder contains no run.
    """
    path = folder.rstrip("/") or folder
    run = RunView(path)
    check_run_folder(path, run.storage)
    # Not from a checkpoint: the newest attempt may have saved none yet.
    derived = run.environment.content.get("derived")
    config: Mapping[str, Any] | None = run.config
    # A flipped byte may have changed a value.
    if not is_complete(run.config) or "\N{REPLACEMENT CHARACTER}" in run.config_text:
        config = None
    elif isinstance(derived, list):
        config = _set_null(run.config, [str(key) for key in derived])
    elif checkpoint_root(run.storage, path) is not None:
        # Releases before 0.2 did not record which values were derived; checkpoints have null there.
        promised = read_promised(path, "latest", run.storage).get("config", config)
        config = restore_secrets(promised, config)
    if config is None:
        near = ";"
        above = str(Path(folder).parent)
        if run.storage.exists(f"{above}/{CONFIG}"):
            near = f"; did you mean {above!r}?"
        raise ConfigError(
            f"{folder!r}: there is no readable {CONFIG} in it{near} expected the folder of a run",
            code="run.not_found",
        )
    allowed = lookup(config, "RUN.allow")
    if not isinstance(allowed, list):
        allowed = []
    return replace(_make_stored(run, config), allowed=tuple(map(str, allowed)))


def read_checkpoint_config(folder: str, checkpoint: str = "latest") -> StoredConfig:
    """Return the config with which a checkpoint of a run was saved, without reading its weights.

    Args:
        folder: folder of a run, or of one checkpoint.
        checkpoint: `latest`, `best`, a name, or the path of a checkpoint.

    Raises:
        ConfigError: there is no such run or checkpoint.
    """
    path = folder.rstrip("/") or folder
    storage = open_storage(path)
    check_run_folder(path, storage)
    promised = read_promised(path, checkpoint, storage)
    return _of_promised(path, promised.get("config"), storage)


def read_loaded_config(loaded: LoadedCheckpoint, path: str) -> StoredConfig:
    """Return the config of a checkpoint that has been loaded.

    Args:
        loaded: the checkpoint.
        path: as the user named it.
    """
    return _of_promised(path, loaded.promised["config"], open_storage(loaded.path), loaded.path)


def _of_promised(path: str, config: Any, storage: Storage, checkpoint: str = "") -> StoredConfig:
    if not is_complete(config):
        raise ConfigError(
            f"{path!r}: the config in its checkpoint is not complete; expected the folder of a run",
            code="run.not_found",
        )
    folder = (checkpoint or path).rpartition("/checkpoints/")[0] or path
    run = RunView(folder, storage)
    return replace(_make_stored(run, restore_secrets(config, run.config)), path=path)


def _make_stored(run: RunView, config: Mapping[str, Any]) -> StoredConfig:
    """Return a config with the records of its run: the overrides, which are for people and may be
    damaged, and the environment."""
    kept = [
        _find_file(word, run.environment.folder)
        for word in run.overrides
        if not is_of_command(key_of(word))
    ]
    return StoredConfig(run.path, _without_command(config), run.path, tuple(kept), run.environment)


def _find_file(word: str, folder: str) -> str:
    """Return an override; the path of an experiment file that is not here begins at `folder`."""
    if is_file_word(word) and not Path(word).exists():
        return str(Path(folder, word))
    return word


def is_complete(config: Any) -> bool:
    """Return whether a value is the config of a run."""
    return isinstance(config, Mapping) and all(
        isinstance(config.get(section), Mapping) for section in ESSENTIAL
    )


def list_derived(asked: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the paths that are null in `asked` and have a value in the resolved config."""
    # Name and folder of a run follow from its experiment, which no later command names.
    fixed = ("RUN.name", "RUN.dir")
    return [
        path
        for path, value in leaves(asked).items()
        if value is None and lookup(config, path) is not None and path not in fixed
    ]


def _set_null(config: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    changed: dict[str, Any] = deepcopy(dict(config))
    for path in paths:
        parent, _, name = path.rpartition(".")
        section = lookup(changed, parent)
        if isinstance(section, dict) and name in section:
            section[name] = None
    return changed


def is_of_command(path: str) -> bool:
    """Return whether a key belongs to one command, so that the next one does not inherit it."""
    return default_schema().scope(path) == "command"


def _without_command(config: Mapping[str, Any]) -> dict[str, Any]:
    run = {key: value for key, value in config["RUN"].items() if not is_of_command(f"RUN.{key}")}
    return deepcopy({**config, "RUN": run})
