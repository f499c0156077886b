"""Custom code that a packed model needs: named in its file, and never part of it."""

import importlib
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from phasetrain.app.stored.trust import list_code
from phasetrain.config.nested import iter_texts
from phasetrain.config.plugins import PLUGINS
from phasetrain.data import COLLATES, TRANSFORMS
from phasetrain.errors import ConfigError
from phasetrain.models import HEADS, MODELS
from phasetrain.tasks import TASKS

log = logging.getLogger(__name__)

REGISTRIES = (MODELS, HEADS, TRANSFORMS, COLLATES, TASKS)
"""Registries of the parts that predictions need."""


@dataclass(frozen=True)
class NeededCode:
    """A module with parts that a packed model needs.

    Attributes:
        module: its name.
        file: name of its file; empty if it is not known.
        sha256: digest of its source; empty if it is not known.
        parts: registered names, or dotted paths below the module.
    """

    module: str
    file: str = ""
    sha256: str = ""
    parts: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `pack.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "NeededCode":
        """Read the entry of `pack.json`."""
        texts = {key: str(entry.get(key, "")) for key in ("module", "file", "sha256")}
        parts = entry.get("parts", ())
        return cls(**texts, parts=[str(part) for part in parts])

    def describe(self) -> str:
        """Return a line about it."""
        digest = f", sha256 {self.sha256[:12]}" if self.sha256 else ""
        return f"  {self.module} ({self.file or 'file unknown'}{digest}): {', '.join(self.parts)}"


def find_needed_code(config: Mapping[str, Any]) -> list[NeededCode]:
    """Return the modules with custom parts that a config names; they are imported already.

    Args:
        config: of the parts that predictions need.
    """
    # Any text that is the name of a custom part: parameters of parts name further parts.
    texts = {text for _, text in iter_texts(config)}
    modules: dict[str, list[str]] = {}
    for registry in REGISTRIES:
        for name in registry:
            module = inspect.getmodule(inspect.unwrap(registry[name]))
            if name in texts and module is not None and _is_custom(module):
                modules.setdefault(module.__name__, []).append(name)
    for _, path in list_code(config):
        modules.setdefault(path.rpartition(".")[0], []).append(path)
    return [_describe_module(name, sorted(set(parts))) for name, parts in sorted(modules.items())]


def _is_custom(module: ModuleType) -> bool:
    """Return whether a module is neither of phasetrain nor of a plugin, which registers its parts
    wherever it is installed."""
    package = module.__name__.partition(".")[0]
    plugins = {point.module.partition(".")[0] for point in entry_points(group=PLUGINS)}
    return package != "phasetrain" and package not in plugins


def _describe_module(name: str, parts: Sequence[str]) -> NeededCode:
    module = sys.modules.get(name)
    # Modules of a notebook, and classes below a class, have no file.
    if module is None or module.__file__ is None:
        return NeededCode(name, parts=parts)
    file = module.__file__
    return NeededCode(name, Path(file).name, sha256(Path(file).read_bytes()).hexdigest(), parts)


def import_needed_code(
    path: str, needed: Sequence[NeededCode], config: Mapping[str, Any], imports: Sequence[str]
) -> frozenset[str]:
    """Import the custom code that a packed model needs, from the files that the user gives.

    A registered part of a module that this process has imported already needs no file.

    Args:
        path: the packed model, for messages.
        needed: as its file says.
        config: of the parts that predictions need.
        imports: files, or names of modules.

    Returns:
        The dotted paths that the config may name.

    Raises:
        ConfigError: a module is not given (`pack.code_needed`), a given one is neither a file nor a
            needed module, or an import fails.
    """
    needed = _add_unlisted(needed, config)
    _check_imports(needed, imports)
    missing = []
    for code in needed:
        chosen = _choose_import(code, imports)
        if chosen is not None:
            _import(code, chosen)
        elif not _is_registered(code):
            missing.append(code)
    if missing:
        listed = "\n".join(code.describe() for code in missing)
        raise ConfigError(
            f"{path} needs code that is not part of it:\n{listed}\nGet the source from the author, "
            "read it, and name each file: --imports FILE.py, or imports=[...] in Python",
            code="pack.code_needed",
        )
    return frozenset(name for _, name in list_code(config))


def _add_unlisted(needed: Sequence[NeededCode], config: Mapping[str, Any]) -> list[NeededCode]:
    """Return the needed modules, and the modules of all dotted paths of the config: the list in a
    file from elsewhere may be incomplete."""
    by_module = {code.module: code for code in needed}
    for _, path in list_code(config):
        module = path.rpartition(".")[0]
        code = by_module.setdefault(module, NeededCode(module))
        if path not in code.parts:
            by_module[module] = replace(code, parts=[*code.parts, path])
    return list(by_module.values())


def _check_imports(needed: Sequence[NeededCode], imports: Sequence[str]) -> None:
    """Reject files that do not exist, also those that the model would not need: anyone who names a
    file expects that it is used."""
    modules = [code.module for code in needed]
    for name in imports:
        if name not in modules and not Path(name).is_file():
            expected = f" or one of the modules {', '.join(modules)}" if modules else ""
            raise ConfigError(
                f"--imports {name}: there is no such file; expected a file{expected}",
                code="config.import_failed",
            )


def _choose_import(needed: NeededCode, imports: Sequence[str]) -> str | None:
    """Return the file or module of the user that is meant; a file under another name is recognized
    by its digest."""
    last = needed.module.rpartition(".")[2]
    package = f"{last}/__init__"
    for name in imports:
        stem = name.removesuffix(".py")
        if name == needed.module or stem == last or stem.endswith((f"/{last}", f"/{package}")):
            return name
    # Mail programs and browsers rename files, such as `parts (1).py`.
    for name in imports:
        if Path(name).is_file() and _hash_file(name) == needed.sha256:
            return name
    return None


def _is_registered(needed: NeededCode) -> bool:
    names = {name for registry in REGISTRIES for name in registry}
    return needed.module in sys.modules and set(needed.parts) <= names


def _import(needed: NeededCode, file_or_module: str) -> None:
    """Import a module, from a file unless its name is given.

    Raises:
        ConfigError: its import fails.
    """
    try:
        if file_or_module == needed.module:
            importlib.import_module(file_or_module)
        elif needed.module not in sys.modules:
            _import_file(needed.module, Path(file_or_module).resolve())
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--imports {file_or_module}: the import failed ({type(error).__name__}: {error}); "
            "correct the file, or install what it needs",
            code="config.import_failed",
        ) from error
    if (
        file_or_module != needed.module
        and needed.sha256
        and _hash_file(file_or_module) != needed.sha256
    ):
        log.warning(
            "--imports %s: not the source with which the model was packed (sha256 %s); the example "
            "decides whether it computes the same",
            file_or_module,
            needed.sha256,
        )


def _import_file(module: str, file: Path) -> None:
    """Import a file under the name of a module."""
    root = file.parent
    for _ in range(module.count(".")):
        root = root.parent
    if str(root) not in sys.path:
        # Last, so that no file of the folder hides a module of a library; for modules that it
        # imports itself.
        sys.path.append(str(root))
    if "." in module:
        imported = importlib.import_module(module)
        if imported.__file__ is None or Path(imported.__file__).resolve() != file:
            raise ImportError(f"Python finds {module} in {imported.__file__}")
        return
    # Not by its name, which may be that of another module that Python finds first.
    spec = spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not Python source")
    made = module_from_spec(spec)
    # Before it is executed, as Python's own import does: dataclasses look their module up there.
    sys.modules[module] = made
    try:
        spec.loader.exec_module(made)
    except BaseException:
        # A later import would find the half of it that was executed.
        del sys.modules[module]
        raise


def _hash_file(path: str) -> str:
    return sha256(Path(path).read_bytes()).hexdigest()
