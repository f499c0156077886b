"""Whether the code that a stored config names may run.

The config of a run folder names modules to import (RUN.imports) and dotted paths. They are run if
the user says so, or if a run of this user named the same ones: the run signs their names and files
with a key in the user's home, which the author of a folder does not have.
"""

import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from phasetrain.app.stored.stored_config import StoredConfig
from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import lookup
from phasetrain.config.nested import iter_texts, leaves
from phasetrain.config.trust import DOTTED_PATH, is_library_path, make_trust_error
from phasetrain.errors import ConfigError, Problem

SIGNATURE = "code"
"""Entry of environment.json with the signed names of custom code."""

IMPORTS = "RUN.imports"

KEY_BYTES = 32

Code = list[tuple[str, str]]
"""Pairs of a config key and the module or dotted path in it."""


def list_code(config: Mapping[str, Any]) -> Code:
    """Return the custom code that a config names: the modules of RUN.imports, and dotted paths
    outside of known libraries."""
    imports = lookup(config, IMPORTS)
    code = []
    if isinstance(imports, list | tuple):
        code = [(IMPORTS, str(name)) for name in imports]
    sections = {key: value for key, value in config.items() if key not in ("RUN", "LAUNCH")}
    for path, text in iter_texts(sections):
        is_name = path.rpartition(".")[2].partition("[")[0] in _NAME_KEYS
        if is_name and DOTTED_PATH.fullmatch(text) and not is_library_path(text):
            code.append((path, text))
    return code


_NAME_KEYS = (
    *("name", "dataset", "sampler", "collate", "loader", "transforms", "batch_transforms"),
    *("strategy", "scaler", "when"),
)
"""Last names of the keys that choose a part."""


def check_code(
    stored: StoredConfig, composed: Composed, changes: Sequence[Mapping[str, Any]]
) -> frozenset[str]:
    """Reject custom code that a folder names and that its user has not signed.

    Code that the user has named in the changes is trusted, and so is a module of RUN.imports that
    this process has imported already.

    Args:
        stored: the config of the folder.
        composed: the same with changes.
        changes: the values that the user has given, in the command or in own files.

    Returns:
        The dotted paths that registries may import.

    Raises:
        ConfigError: lists each module and path.
    """
    trusted = _list_given(changes) | stored.trusted_names
    code = list_code(composed.config)
    unknown = [
        (key, name)
        for key, name in code
        if name not in trusted and not (key == IMPORTS and name in sys.modules)
    ]
    unknown += [(key, name) for key, name in _list_jobs(composed.config) if key not in trusted]
    if not unknown or is_signed(stored, [name for _, name in unknown]):
        return frozenset({name for _, name in code} | trusted)
    problems: list[Problem] = []
    for key, name in unknown:
        problems += make_trust_error(name, key).problems
    listed = "\n".join(_locate(unknown, stored.code_folders))
    raise ConfigError(
        f"{stored.path} needs code that is not part of phasetrain, and this run was not made by "
        f"you:\n"
        f"{listed}\n"
        "Loading it runs this code. If you trust the folder, repeat the command with --trust, or "
        "trust=True in Python",
        code="trust.needed",
        problems=problems,
    )


def describe_code(stored: StoredConfig, config: Mapping[str, Any]) -> list[str]:
    """Return a line per module and dotted path outside of known libraries that a config names, with
    the file that Python finds for it. A trusted folder runs this code."""
    return _locate(list_code(config) + _list_jobs(config), stored.code_folders)


def _list_jobs(config: Mapping[str, Any]) -> Code:
    """Return the key that submits jobs; the setup commands of a job are shell commands."""
    cluster = config.get("LAUNCH", {}).get("cluster")
    return [("LAUNCH.cluster", cluster)] if cluster in ("slurm", "local") else []


def _locate(code: Code, folders: Sequence[str]) -> list[str]:
    lines = []
    for key, name in code:
        file = "" if key == "LAUNCH.cluster" else _find_file(name, folders)
        lines.append(f"  {key}: {name} ({file})" if file else f"  {key}: {name}")
    return lines


def _list_given(changes: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the keys and the texts that the user has given as changes of the stored config."""
    words: set[str] = set()
    for values in changes:
        words |= leaves(values).keys() | {text for _, text in iter_texts(values)}
    return words


def sign_code(names: Sequence[str]) -> dict[str, Any] | None:
    """Return the entry of environment.json by which a later command of this user recognizes the
    code of a run; None if there is none, or no place to keep a key."""
    # Most runs have no custom code, and leave nothing in the user's home.
    if not names:
        return None
    key = _read_key(create=True)
    if key is None:
        return None
    files = {name: _find_file(name) for name in sorted(set(names))}
    return {"files": files, "signature": _sign(key, files)}


def is_signed(stored: StoredConfig, names: Sequence[str]) -> bool:
    """Return whether a run of this user named the same code, found in the same files."""
    entry = stored.environment.content.get(SIGNATURE)
    key = _read_key(create=False)
    if key is None or not isinstance(entry, Mapping) or not isinstance(entry.get("files"), Mapping):
        return False
    files = dict(entry["files"])
    # Without compare_digest, the time of the comparison tells how many characters are right.
    if not hmac.compare_digest(_sign(key, files), str(entry.get("signature"))):
        return False
    return all(files.get(name) == _find_file(name, stored.code_folders) for name in names)


def _sign(key: bytes, files: Mapping[str, Any]) -> str:
    content = json.dumps(files, sort_keys=True).encode(errors="surrogateescape")
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def select_code_folders(config: Mapping[str, Any], folders: Sequence[str]) -> list[str]:
    """Return the folders that hold a module which a config names.

    No other folder is searched: a folder that came with the records of a run must not provide
    modules that some library imports if they exist.
    """
    names = {name.partition(".")[0] for _, name in list_code(config)}
    return [
        folder
        for folder in folders
        if any(PathFinder.find_spec(name, [folder]) is not None for name in names)
    ]


def _find_file(name: str, folders: Sequence[str] = ()) -> str:
    """Return the file of the package that a module or dotted path is in, without importing it."""
    # The working directory comes before the recorded folders, as in `run_imports`.
    search_path = [*sys.path, str(Path.cwd()), *folders]
    spec = PathFinder.find_spec(name.partition(".")[0], search_path)
    if spec is None:
        return ""
    file = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return str(Path(file).resolve())


def _read_key(*, create: bool) -> bytes | None:
    """Return the secret key of this user, or None if there is none and none can be made."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(state, "phasetrain", "key")
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            made = path.with_name(f"key-{secrets.token_hex(8)}")
            made.touch(mode=0o600)
            made.write_bytes(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):
                os.link(made, path)  # unlike a rename, keeps the key of a run that was faster
            made.unlink()
        key = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    if len(key) != KEY_BYTES:
        return None  # cut short by a full disk: whoever guesses it could sign
    return key
