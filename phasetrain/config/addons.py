"""Add-ons: packages that add commands, engines, parts and config keys to phasetrain.

An installed package names a function in the entry point group `phasetrain.addons`. The function
gets an `AddOn` and declares the additions of the package. The add-ons of phasetrain do the same:

    [project.entry-points."phasetrain.addons"]
    spikes = "phasetrain_spikes:register"

Modules are declared by name and imported when they are used, so that an add-on costs nothing until
then. The function itself should only import modules that it needs for the declarations.
"""

import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from phasetrain.config.exports import find_public
from phasetrain.config.parts import DECLARED_PARTS, REGISTRIES
from phasetrain.errors import ConfigError, did_you_mean

GROUP = "phasetrain.addons"
"""Entry point group of add-ons."""

OWN_PACKAGE = "phasetrain.addons"
"""Package with the add-ons of phasetrain itself."""

KINDS = tuple(REGISTRIES)
"""Kinds of parts: each has a registry."""


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        name: one or two words, such as `runs list`.
        synopsis: arguments as the usage shows them.
        help: one line.
        run: `module:function` that takes a `phasetrain.cli.parsing.Call` and returns an `Outcome`.
        takes_overrides: whether the command has `--config-dir`, `--cfg` and overrides.
        arguments: `module:function` that declares further arguments on an `ArgumentParser`.
        engine: value of RUN.engine with which the command uses the config of a folder, for `--cfg`.
        config_words: `module:function` that takes a `Call` and returns the overrides for `--cfg`,
            or None for those on the command line.
        choices: words that the command takes, for completion.
    """

    name: str
    synopsis: str
    help: str
    run: str
    takes_overrides: bool = False
    arguments: str = ""
    engine: str = "train"
    config_words: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """A value of RUN.engine.

    Attributes:
        name: the value.
        run: `module:function` that takes a `Setup` and `Extras` (`phasetrain.app.engines`) and
            returns a `RunResult`.
        is_distributed: whether several ranks may take part.
        needs_training_data: whether the config must have DATA.TRAIN.
        runs_as_job: whether LAUNCH starts it, as a job or as ranks on this machine.
    """

    name: str
    run: str
    is_distributed: bool = True
    needs_training_data: bool = True
    runs_as_job: bool = False


@dataclass(frozen=True)
class PartPlace:
    """A place in the config where a name chooses a part.

    Attributes:
        path: dotted path; `*` is one label or data split, a name with `[]` each item of a list.
        kind: kind of parts, whose registry has the name.
        provided: parameters that the program passes and a config must not set.
        other_keys: keys of the place that are no parameters of the part; their reader checks them.
        only: a part and its name; the place exists only within parts of this name. The part is
            given by its own place, the beginning of `path`.
        section: `module:Class` of a dataclass with keys of the place, next to the parameters of the
            part, see `phasetrain.config.sections`.
    """

    path: str
    kind: str
    provided: frozenset[str] = frozenset()
    other_keys: tuple[str, ...] = ()
    only: tuple[str, str] | None = None
    section: str = ""


@dataclass
class AddOn:
    """The parts, commands, keys and services of one add-on.

    Args:
        name: name of its entry point.
        package: the installed distribution, for messages.
        error: why it could not be loaded; empty if it was.
        is_deleted: whether it belongs to phasetrain, and its folder was deleted.
    """

    name: str
    package: str
    error: str = ""
    is_deleted: bool = False
    commands: list[Command] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    parts: dict[str, Mapping[str, str]] = field(default_factory=dict)
    bridges: dict[str, dict[str, str]] = field(default_factory=dict)
    slots: list[PartPlace] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    services: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add_commands(self, *commands: Command) -> None:
        """Add commands."""
        self.commands += commands

    def add_engines(self, *engines: Engine) -> None:
        """Add values of RUN.engine."""
        self.engines += engines

    def add_parts(self, kind: str, modules: Mapping[str, str]) -> None:
        """Add parts that modules register.

        Args:
            kind: kind of the parts, one of `KINDS`.
            modules: name of a part -> module whose import registers it.

        Raises:
            ValueError: there is no such kind.
        """
        _check_kind(kind)
        self.parts[kind] = {**self.parts.get(kind, {}), **modules}

    def add_slots(self, *slots: PartPlace) -> None:
        """Add places in the config where a name chooses a part, such as the parameters of a part
        that holds others.

        Raises:
            ValueError: there is no such kind of parts.
        """
        for slot in slots:
            _check_kind(slot.kind)
        self.slots += slots

    def add_bridges(self, kind: str, modules: Mapping[str, str]) -> None:
        """Add bridges to the parts of libraries, see `phasetrain.config.registry.Registry.bridge`.

        Args:
            kind: kind of the parts, one of `KINDS`.
            modules: library -> module whose import registers the bridge.

        Raises:
            ValueError: there is no such kind.
        """
        _check_kind(kind)
        self.bridges.setdefault(kind, {}).update(modules)

    def add_section(self, name: str, path: str) -> None:
        """Add a section of the config.

        Args:
            name: such as `EXTRACT`.
            path: `module:Class` of its dataclass, see `phasetrain.config.sections`.
        """
        self.sections[name] = path

    def add_keys(self, section: str, path: str) -> None:
        """Add keys to a section of the core.

        Args:
            section: such as `RUN`. Keys of `HOOKS` are hooks that are on by default.
            path: `module:Class` of a dataclass with the keys.
        """
        self.keys.setdefault(section, []).append(path)

    def add_service(self, name: str, path: str) -> None:
        """Offer a function to the core and to other add-ons, which find it by `find_service`."""
        self.services[name] = path

    def add_name(self, name: str, path: str) -> None:
        """Add `phasetrain.NAME` to the Python API."""
        self.names[name] = path


@cache
def load_addons() -> tuple[AddOn, ...]:
    """Return the installed add-ons, with the add-ons of phasetrain first; one that failed adds
    nothing, and has an `error`.

    Raises:
        ConfigError: two add-ons add the same thing.
    """
    points = {(point.name, point.value): point for point in entry_points(group=GROUP)}
    addons = [_load(point) for point in sorted(points.values(), key=_sort_key)]
    addons += _list_unlisted({addon.name for addon in addons})
    _reject_conflicts(addons)
    return tuple(addons)


def _load(point: EntryPoint) -> AddOn:
    package = point.dist.name if point.dist is not None else point.module
    addon = AddOn(point.name, package)
    try:
        point.load()(addon)
    except Exception as error:  # noqa: BLE001 - an installed package can raise anything
        # The metadata of the installed phasetrain still lists an add-on whose folder was deleted.
        is_deleted = _is_own(point) and not _has_source(point.module)
        # A stale package must not block every run.
        reason = f"{type(error).__name__}: {error}"
        addon = AddOn(point.name, package, "" if is_deleted else reason, is_deleted)
    return addon


def _list_unlisted(names: Collection[str]) -> list[AddOn]:
    """Return the add-ons of phasetrain that are there, and that its installed metadata lacks: it is
    older than the code."""
    reason = "the installed metadata does not list it; install phasetrain again"
    folder = Path(__file__).parents[1] / "addons"
    return [
        AddOn(path.parent.name, "phasetrain", reason)
        for path in sorted(folder.glob("*/__init__.py"))
        if path.parent.name not in names
    ]


def explain_missing() -> str:
    """Return the end of a message that something is unknown, which names the add-ons that may have
    it: deleted add-ons of phasetrain and add-ons that failed; empty if there are none."""
    deleted = ", ".join(addon.name for addon in load_addons() if addon.is_deleted)
    text = f"; not installed here: the add-ons {deleted} of phasetrain" if deleted else ""
    return "; ".join([text, *list_failures()])


def list_failures() -> list[str]:
    """Return a warning for each installed add-on that failed."""
    return [
        f"add-on {addon.name!r} of {addon.package} is skipped: {addon.error}"
        for addon in load_addons()
        if addon.error
    ]


def _has_source(module: str) -> bool:
    """Return whether a package has source files; a deleted one may have left its caches."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(
            f"there is no kind of parts {kind!r}{did_you_mean(kind, KINDS) or '.'} Kinds: "
            f"{', '.join(KINDS)}"
        )


def _is_own(point: EntryPoint) -> bool:
    return point.module.startswith(f"{OWN_PACKAGE}.")


def _sort_key(point: EntryPoint) -> tuple[bool, str]:
    return not _is_own(point), point.name


def _reject_conflicts(addons: Sequence[AddOn]) -> None:
    core = AddOn("core", "phasetrain", parts=dict(DECLARED_PARTS))
    owners: dict[tuple[str, str], AddOn] = {}
    for addon in (core, *addons):
        for thing in _list_names(addon):
            other = owners.setdefault(thing, addon)
            if other is core and addon is not core:
                raise make_conflict_error(addon, f"the {thing[0]} {thing[1]!r}")
            if other is not addon:
                raise ConfigError(
                    f"the {thing[0]} {thing[1]!r} is added by two installed packages, "
                    f"{other.package!r} and {addon.package!r}; uninstall one of them",
                    code="addon.conflict",
                )


def make_conflict_error(addon: AddOn, thing: str) -> ConfigError:
    """Return the error about an add-on that adds something that already exists.

    Args:
        addon: the add-on.
        thing: the addition in conflict, such as `the command 'train'`.
    """
    return ConfigError(
        f"{thing} is added by the installed package {addon.package!r}, and there is one already; "
        f"uninstall {addon.package!r}",
        code="addon.conflict",
    )


def _list_names(addon: AddOn) -> Iterator[tuple[str, str]]:
    yield from (("command", command.name) for command in addon.commands)
    yield from (("engine", engine.name) for engine in addon.engines)
    yield from (("section", name) for name in addon.sections)
    yield from (("place of a part", describe_place(slot)) for slot in addon.slots)
    yield from (("service", name) for name in addon.services)
    yield from (("name", name) for name in addon.names)
    for kind, modules in addon.parts.items():
        yield from ((kind, name) for name in modules)
    for kind, modules in addon.bridges.items():
        yield from ((f"bridge for {kind} parts of", library) for library in modules)


def describe_place(slot: PartPlace) -> str:
    """Return the path of a place, and the part that has it."""
    if slot.only is None:
        return slot.path
    return f"{slot.path} of {slot.only[1]}"


@cache
def list_parts(kind: str) -> Mapping[str, str]:
    """Return the declared parts of a kind, of the core and of add-ons: name -> module whose import
    registers it."""
    parts = dict(DECLARED_PARTS.get(kind, {}))
    for addon in load_addons():
        parts |= addon.parts.get(kind, {})
    return parts


@cache
def list_bridges(kind: str) -> Mapping[str, str]:
    """Return the bridges that add-ons add for a kind of parts: library -> module."""
    bridges: dict[str, str] = {}
    for addon in load_addons():
        bridges |= addon.bridges.get(kind, {})
    return bridges


def find_service(name: str) -> Any:
    """Return the function that an add-on offers under a name; None if no add-on does."""
    for addon in load_addons():
        if name in addon.services:
            return import_object(addon.services[name])
    return None


def require_service(name: str, addon: str, purpose: str) -> Any:
    """Return the function that an add-on offers under a name.

    Args:
        name: the name.
        addon: add-on of phasetrain that offers it, for the message.
        purpose: the feature that needs it, the beginning of the message.

    Raises:
        ConfigError: no installed add-on offers it.
    """
    service = find_service(name)
    if service is None:
        raise ConfigError(
            f"{purpose} needs the add-on {addon!r} of phasetrain, which is not installed here; "
            "install phasetrain with all of its add-ons",
            code="addon.missing",
        )
    return service


def find_name(name: str) -> str | None:
    """Return `module:name` of a name that an add-on adds to the Python API; None if none does."""
    for addon in load_addons():
        if name in addon.names:
            return addon.names[name]
    return None


def import_object(path: str) -> Any:
    """Return the object at `module:name`.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    value = find_public(import_module(module), name)
    if value is None:
        raise ConfigError(
            f"an add-on names {path!r}, and the module {module!r} has no {name!r}; update or "
            f"uninstall the package of {module.partition('.')[0]!r}",
            code="addon.failed",
        )
    return value


def import_module(name: str) -> ModuleType:
    """Import a module that an add-on names.

    Raises:
        ConfigError: there is none.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a library that the module needs
        raise ConfigError(
            f"an add-on names the module {name!r}, which does not exist; update or uninstall the "
            f"package of {name.partition('.')[0]!r}",
            code="addon.failed",
        ) from error
