"""Import of modules that register parts: modules in RUN.imports, and installed packages."""

import importlib
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from phasetrain.errors import PhasetrainError, Problem, did_you_mean, is_user_file

PLUGINS = "phasetrain"
"""Entry point group of installed packages that register parts."""


def run_imports(names: Sequence[str], folders: Sequence[str] = ()) -> list[Problem]:
    """Import the modules of `RUN.imports`, so that their parts are registered; the current folder
    is searched too.

    Args:
        names: modules.
        folders: searched after the current folder.

    Returns:
        one problem per module that failed: its error, and the file and line that raised it.
    """
    searched = (str(Path.cwd()), *folders)
    for folder in searched:
        if folder not in sys.path:
            # Last, so that no file of the folder hides a module of a library. It is not removed,
            # since spawned data loading workers import the same modules.
            sys.path.append(folder)
    problems = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module can raise anything
            message = f"RUN.imports: {_describe_import_error(name, error)}"
        else:
            file = getattr(module, "__file__", None) or "<part of Python>"
            hidden = [
                path
                for folder in searched
                for path in (Path(folder, f"{name}.py"), Path(folder, name, "__init__.py"))
                if path.is_file()
            ]
            if is_user_file(file) or not hidden:
                continue
            message = f"RUN.imports: {name} is {file}, which hides {hidden[0]}; rename it"
        problems.append(Problem.from_message(message, "config.import_failed", "RUN.imports"))
    return problems


def load_plugins() -> list[str]:
    """Load the entry points of group `phasetrain`, so that installed packages register their parts.

    Returns:
        one warning per entry point that failed; a stale package must not block every run.
    """
    warnings = []
    for point in _find_plugins(tuple(sys.path)):
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - an installed package can raise anything
            package = point.dist.name if point.dist is not None else "unknown package"
            reason = _describe_import_error(point.module, error)
            warnings.append(f"plugin {point.name!r} of {package} is skipped: {reason}")
    return warnings


@lru_cache(maxsize=1)  # reading the metadata of all packages takes as long as composing the config
def _find_plugins(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of the packages in the folders of `sys.path`."""
    return tuple(entry_points(group=PLUGINS))


def _describe_import_error(name: str, error: Exception | SystemExit) -> str:
    if _is_missing(name, error):
        files: list[str] = []
        with suppress(OSError):  # this user may not be allowed to read the current folder
            files = [path.stem for path in Path.cwd().glob("*.py")]
        near = did_you_mean(name.removesuffix(".py"), files)
        return f"there is no module {name!r}, neither installed nor in {Path.cwd()}{near}"
    if isinstance(error, SyntaxError):
        return f"module {name!r} failed: {error.msg} ({error.filename}:{error.lineno})"
    # The innermost frame of the user's code: not importlib, and not the call in this file.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]
        if not frame.filename.startswith("<frozen importlib")
        and frame.filename not in (importlib.__file__, __file__)
    ]
    # The registry that rejects a name is not the place of the mistake.
    frames = [frame for frame in frames if is_user_file(frame.filename)] or frames
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    prefix = "" if isinstance(error, PhasetrainError) else f"{type(error).__name__}: "
    return f"module {name!r} failed: {prefix}{error}{location}"


def _is_missing(name: str, error: Exception | SystemExit) -> bool:
    """Return whether the module itself, or a package that it is in, does not exist; the same error
    is raised for a module that it imports."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return False
    return f"{name}.".startswith(f"{error.name}.")
