"""The user's source files that a run is made of, to notice that they have changed."""

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType
from typing import Any

from phasetrain.app.setup import Setup
from phasetrain.config.nested import iter_texts
from phasetrain.errors import is_user_file

DECLARATION = re.compile(
    rb"^[ \t]*(?:observe_only = (?:True|False)|recomputed = \((?:[\"']\w+[\"'],? ?)+\))\n"
    rb"(?:[ \t]*\n)*",
    re.MULTILINE,
)
"""A line by which a class or module says that the training does not depend on what it keeps."""


def hash_sources(setup: Setup, *, is_whole: bool = False) -> dict[str, str]:
    """Return module -> SHA-256 of its source; empty if the file is gone.

    Without the lines that declare what has no effect, unless `is_whole`: adding one changes no bit.
    The modules are listed in RUN.imports, or define parts named by a dotted path or objects given
    in Python; and the modules in the user's files that these import, directly or not.
    """
    digests = {}
    for name, path in _list_modules(setup).items():
        content = _read_bytes(path)
        if content is not None and not is_whole:
            content = DECLARATION.sub(b"", content)
        digests[name] = "" if content is None else sha256(content).hexdigest()
    return digests


def list_source_changes(setup: Setup, promised: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each source file that has changed since a checkpoint, and for a change
    of RUN.imports.

    Args:
        setup: of this attempt.
        promised: facts in the checkpoint for later attempts, see `build_promise`.
    """
    recorded = promised.get("code", {})
    paths = _list_modules(setup)
    whole = hash_sources(setup, is_whole=True)  # as checkpoints of earlier versions have it
    changed = [
        f"{os.path.relpath(paths[name])} has changed"
        for name, digest in hash_sources(setup).items()
        if name in recorded and recorded[name] not in (digest, whole[name])
    ]
    before = list(promised["config"]["RUN"].get("imports", ()))
    # The same names may be registered by another module: two files that both define `focal`.
    if set(before) != set(setup.config.RUN.imports):
        changed.append(f"RUN.imports was [{', '.join(before)}]")
    return changed


def _list_modules(setup: Setup) -> dict[str, str]:
    """Return module -> path of its file, in the order of discovery."""
    imports = [*setup.config.RUN.imports]
    left = [*imports, *_list_part_modules(setup.config), *_list_object_modules(setup)]
    paths: dict[str, str] = {}
    while left:
        name = left.pop(0)
        path = _find_file(name, paths)
        if name in paths or path is None or not (name in imports or is_user_file(path)):
            continue
        paths[name] = path
        content = _read_bytes(path)
        if content is not None:
            left += _list_imports(name, path, content)
    return paths


def _list_part_modules(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules of the dotted paths among the texts of a config."""
    for _, text in iter_texts(config):
        # Only modules that building the parts has imported: other texts with a dot are paths or
        # numbers.
        if text.rpartition(".")[0] in sys.modules:
            yield text.rpartition(".")[0]


def _list_object_modules(setup: Setup) -> Iterator[str]:
    """Yield the modules of the objects that were given in Python."""
    for given_object in setup.given.by_name.values():
        owner = (
            given_object.value
            if isinstance(given_object.value, type | FunctionType)
            else type(given_object.value)
        )
        yield owner.__module__


def _find_file(name: str, packages: Mapping[str, str]) -> str | None:
    """Return the path of the source of a module without importing anything; None if there is
    none.

    Args:
        packages: package -> path of its file, for modules that have not been imported.
    """
    parent = name.rpartition(".")[0]
    if name in sys.modules:
        # A module without a file is built in or a namespace package.
        file = vars(sys.modules[name]).get("__file__")
    elif parent and parent not in packages:
        return None
    else:
        # Not importlib.util.find_spec, which imports the parent.
        folders = [str(Path(packages[parent]).parent)] if parent else None
        spec = PathFinder.find_spec(name, folders)
        file = spec and spec.origin
    if isinstance(file, str) and file.endswith(".py"):
        return file
    return None


def _read_bytes(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


# Cached by content too: in a notebook the user edits a module between two runs of one process.
@lru_cache(maxsize=1024)
def _list_imports(name: str, path: str, content: bytes) -> tuple[str, ...]:
    """Return the modules that the source of a module may import, with their parent packages."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        return ()
    package = name
    if Path(path).name != "__init__.py":
        package = name.rpartition(".")[0]
    modules: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # more dots than there are packages
                continue
            # `from package import name` imports the module package.name, if there is one
            modules += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    with_parents: dict[str, None] = {}
    for module in modules:
        names = module.split(".")
        with_parents |= dict.fromkeys(".".join(names[:count]) for count in range(1, len(names) + 1))
    return tuple(with_parents)
