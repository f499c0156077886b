"""The YAML files of the package and of `--config-dir`: Hydra finds, orders and reads them, and each
becomes a layer.

This is the only module that uses internals of Hydra. Hydra's public `compose` returns the merged
result without the origin of each value, and stops at the first mistake. The internals used here
(`ConfigRepository`, which reads files, and `create_defaults_list`, which orders them) have not
changed their signatures since Hydra 1.1.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import GroupDefault
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phasetrain.config.compose.folders import EXPERIMENT, PACKAGE, RECIPES
from phasetrain.config.compose.library_errors import (
    explain_defaults_error,
    explain_file_error,
    explain_unknown_group,
)
from phasetrain.config.compose.yaml_checks import check_yaml
from phasetrain.errors import Problem, did_you_mean

_SELECTED = "_selected_"
"""Name of a file that exists in memory only, whose defaults list has the selected option."""
_GIVEN = f"{EXPERIMENT}/_given_"
"""Path below which Hydra knows an experiment file that was given by its path. No option can have
it, so a given `digits.yaml` may start from the built-in experiment `digits`."""
_PARENT = re.compile(r"In '(?P<parent>[^']+)'")


@dataclass(frozen=True)
class Layer:
    """One source of values.

    Attributes:
        name: a built-in file (`LOSS/focal.yaml`), the path of a user's file, or `command line`.
        values: nested mapping from the root of the config.
    """

    name: str
    values: dict[str, Any]


class ConfigFiles:
    """The options of all groups: files of the package, then files of the user's folder.

    Args:
        config_dir: folder laid out as `configs/`: `experiment/mine.yaml`, `LOSS/mine.yaml`, ...

    Attributes:
        config_dir: the same.
        problems: files that cannot be used, in the order found.
    """

    def __init__(self, config_dir: str | Path | None = None) -> None:
        if hydra.__version__.startswith("1.3."):
            # Without a version base, Hydra 1.3 behaves like 1.1.
            hydra.version.setbase("1.3")
        self.problems: list[Problem] = []
        self._builtin = ImportlibResourcesConfigSource(
            provider="phasetrain", path=f"pkg://{PACKAGE}"
        )
        self._user: FileConfigSource | None = None
        self._given: _GivenFile | None = None
        self.config_dir = config_dir
        if config_dir is not None and not Path(config_dir).is_dir():
            self._add_problem(f"--config-dir {config_dir}", "there is no such folder")
        elif config_dir is not None:
            self._user = _UserFiles(provider="user", path=f"file://{Path(config_dir).absolute()}")
            self._reject_hidden(self._user)

    def is_group(self, group: str) -> bool:
        """Return whether `group` (`LOSS`, `DATA/TRAIN`) is a folder with options."""
        return any(source.is_group(group) for source in self._sources())

    def groups(self) -> list[str]:
        """Return the folders with options, `experiment` first."""
        names = {name for source in self._sources() for name in source.list("", ObjectType.GROUP)}
        return sorted(names - {RECIPES}, key=lambda name: (name != EXPERIMENT, name))

    def options(self, group: str) -> list[str]:
        """Return the names of a group's options in order; those in sub-folders with their path
        (`vision/digits`)."""
        return sorted(
            {
                name
                for source in self._sources()
                if source.is_group(group)
                for name in _names(source, group)
            }
        )

    def select(self, group: str, option: str, *, replaced: Sequence[str] = ()) -> list[Layer]:
        """Return the layers of an option, lowest first: the files of its defaults list and its own.

        Args:
            replaced: groups that the command line selects; their entries in defaults lists are
                skipped.
        """
        selected = GroupDefault(group=f"/{group}", value=option)
        sources = self._sources()
        if self._given is not None:
            sources = [*sources, self._given]
        repository = _Repository(sources, selected, replaced)
        layers = [
            self._layer(repository, path, package)
            for path, package in self._order_files(repository, group, option)
        ]
        for path, sentence in repository.problems:
            self._add_problem(self._label(path), sentence)
        return layers

    def select_file(self, path: Path, *, replaced: Sequence[str] = ()) -> list[Layer]:
        """Return the layers of an experiment file, lowest first.

        The entries of its defaults list are options, as for an experiment in the user's folder, or
        files next to it.

        Args:
            path: an existing file.
            replaced: see `select`.
        """
        self._given = _GivenFile(path)
        group, _, name = _GIVEN.rpartition("/")
        return self.select(group, name, replaced=replaced)

    def name_of(self, path: Path) -> str | None:
        """Return the name under which an experiment file is an option, or None."""
        if self.config_dir is None:
            return None
        folder = Path(self.config_dir, EXPERIMENT).resolve()
        if path.suffix != ".yaml" or not path.resolve().is_relative_to(folder):
            return None
        return path.resolve().relative_to(folder).with_suffix("").as_posix()

    def _order_files(
        self, repository: "_Repository", group: str, option: str
    ) -> Iterator[tuple[str, str]]:
        # Hydra stops at the first missing file; the loop finds all of them.
        while True:
            try:
                # prepend_hydra adds groups of Hydra itself, such as its launcher, which configure
                # nothing here.
                defaults_list = create_defaults_list(
                    repository, _SELECTED, [], prepend_hydra=False, skip_missing=False
                )
            except MissingConfigException as error:
                path = str(error.missing_cfg_file)
                self._add_missing(path, str(error))
                repository.blank(path)  # read it as empty from now on, to find the next problem
                continue
            except (ConfigCompositionException, ValueError) as error:
                sentence = explain_defaults_error(error, self.groups())
                self._add_problem(self._label(_name_parent(error) or f"{group}/{option}"), sentence)
                return
            # Hydra follows a cycle of defaults lists without noticing.
            except RecursionError:
                label = self._label(f"{group}/{option}")
                self._add_problem(label, "its defaults list includes the file itself")
                return
            yield from (
                (str(d.config_path), d.package or "")
                for d in defaults_list.defaults
                if d.config_path != _SELECTED
            )
            return

    def _layer(self, repository: "_Repository", path: str, package: str) -> Layer:
        loaded = repository.load_config(path)
        values: Any = {}
        if loaded is not None:
            # Interpolations may name keys of other layers, so they are resolved after the merge.
            values = OmegaConf.to_container(loaded.config, resolve=False)
        if not isinstance(values, dict):
            self._add_problem(self._label(path), "expected a mapping of keys, found a list")
            values = {}
        for name in reversed(package.split(".") if package else []):
            if name in values and name.isupper():
                text = (
                    f"the keys of this file belong to {package} already; leave out the line "
                    f"`{name}:`, or begin the file with `# @package _global_`"
                )
                self._add_problem(self._label(path), text)
                values = {}
            values = {name: values}
        return Layer(self._label(path), values)

    def _sources(self) -> list[ConfigSource]:
        if self._user is not None:
            return [self._builtin, self._user]
        return [self._builtin]

    def _label(self, path: str) -> str:
        is_option = any(source.is_config(path) for source in self._sources())
        if self._given is not None and not is_option and self._given.is_config(path):
            return str(self._given.find_file(path))
        if (
            self._user is not None
            and self._user.is_config(path)
            and not self._builtin.is_config(path)
        ):
            return str(Path(self.config_dir or ".") / f"{path}.yaml")
        return f"{path}.yaml"

    def _add_problem(self, name: str, sentence: str) -> None:
        self.problems.append(
            Problem("config.invalid_file", f"{name}: {sentence}", name, "", sentence)
        )

    def _add_missing(self, path: str, message: str) -> None:
        named = _PARENT.match(message)
        group, _, option = path.removesuffix(".yaml").rpartition("/")
        parent = self._label(named["parent"]) if named else group
        text = f"{parent}: its defaults list names {group}/{option}.yaml, which does not exist"
        if group and not self.is_group(group):
            # Without a slash, Hydra looks below the folder of the file.
            folder = named["parent"].rpartition("/")[0] if named else ""
            name = group.removeprefix(f"{folder}/")
            groups = [name] if self.is_group(name) else self.groups()
            text += explain_unknown_group(name, option, groups)
        else:
            options = self.options(group)
            near = did_you_mean(option, [*options, "_self_"]) or ";"
            text += f"{near} options of {group}: {', '.join(options)}"
        self.problems.append(Problem.from_message(text, "config.missing_file", parent))

    def _reject_hidden(self, user: ConfigSource) -> None:
        """Report files of the user that have the name of a built-in one, which Hydra would hide."""
        for group in self._builtin.list("", ObjectType.GROUP):
            for option in _names(self._builtin, group):
                path = f"{group}/{option}"
                own = Path(self.config_dir or ".") / f"{path}.yaml"
                # A clone of the source has the built-in files in ./configs.
                if user.is_config(path) and own.read_bytes() != _read_builtin(path):
                    text = f"{own} has the name of the built-in {PACKAGE}/{path}.yaml; rename yours"
                    self.problems.append(Problem.from_message(text, "config.conflict", str(own)))


class _UserFiles(FileConfigSource):
    """The files of a folder; each is checked before Hydra reads it."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        try:
            check_yaml(path.read_text("utf-8"))
            return super().load_config(config_path)
        except RecursionError:
            text = "a value contains an alias (*) to itself, or is nested too deeply"
            raise ValueError(text) from None


class _GivenFile(_UserFiles):
    """An experiment file that was given by its path, and the files next to it, as options of the
    group `experiment`."""

    def __init__(self, path: Path) -> None:
        super().__init__(provider="user", path=f"file://{path.parent.absolute()}")
        self._given = path

    def find_file(self, config_path: str) -> Path:
        """Return the file of an option, which need not exist."""
        if config_path == _GIVEN:
            return self._given
        name = config_path.removeprefix(f"{EXPERIMENT}/").removesuffix(".yaml")
        return self._given.parent / f"{name}.yaml"

    def is_config(self, config_path: str) -> bool:
        # An entry `data: mnist` is `experiment/data/mnist`, an option of another group.
        in_group = config_path.rpartition("/")[0] == EXPERIMENT
        return in_group and self.find_file(config_path).is_file()

    def is_group(self, config_path: str) -> bool:
        return config_path == EXPERIMENT

    def load_config(self, config_path: str) -> ConfigResult:
        return super().load_config(self.find_file(config_path).name)


class _Repository(ConfigRepository):
    """Hydra's file reader, with a first file in memory that selects one option.

    Files in `experiment/` configure all sections, with or without the header
    `# @package _global_`. A file that cannot be parsed is reported and read as empty.
    """

    def __init__(
        self, sources: list[ConfigSource], selected: GroupDefault, replaced: Sequence[str]
    ) -> None:
        # super().__init__ is not called: it would build its sources from a search path of Hydra,
        # to which any installed plugin may add.
        self.sources = sources
        self.problems: list[tuple[str, str]] = []
        self._replaced = frozenset(replaced)
        first = _empty_file()
        first.defaults_list = [selected]
        self._files: dict[str, ConfigResult | None] = {_SELECTED: first}

    def blank(self, config_path: str) -> None:
        """Treat a file as empty from now on."""
        self._files[config_path] = _empty_file()

    def config_exists(self, config_path: str) -> bool:
        return config_path in self._files or bool(super().config_exists(config_path))

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._files:
            self._files[config_path] = self._read(config_path)
        return self._files[config_path]

    def _read(self, config_path: str) -> ConfigResult | None:
        try:
            loaded: ConfigResult | None = super().load_config(config_path)
        except (
            yaml.YAMLError,
            OmegaConfBaseException,
            ValueError,
            AssertionError,
            OSError,
        ) as error:
            self.problems.append((config_path, explain_file_error(error)))
            return _empty_file()
        if loaded is None:
            return None
        if config_path.startswith(f"{EXPERIMENT}/") and loaded.header.get("package") is None:
            loaded.header["package"] = "_global_"
        loaded.defaults_list = [
            d for d in loaded.defaults_list or [] if not self._is_replaced(d, config_path)
        ]
        return loaded

    def _is_replaced(self, default: Any, config_path: str) -> bool:
        if (
            not isinstance(default, GroupDefault)
            # `LOSS@TASK.aux: focal` puts the option elsewhere, so LOSS=... does not replace it.
            or default.package is not None
            or default.group is None
        ):
            return False
        folder = config_path.rpartition("/")[0]
        group = default.group[1:] if default.group.startswith("/") else f"{folder}/{default.group}"
        return group in self._replaced


def _read_builtin(path: str) -> bytes:
    return files(PACKAGE).joinpath(f"{path}.yaml").read_bytes()


def _empty_file() -> ConfigResult:
    return ConfigResult(
        provider="phasetrain",
        path="memory://",
        config=OmegaConf.create({}),
        # Below the package of its folder, it would be an empty section, which may be unknown.
        header={"package": "_global_"},
        defaults_list=[],
    )


def _names(source: ConfigSource, group: str) -> Iterator[str]:
    yield from source.list(group, ObjectType.CONFIG)
    for folder in source.list(group, ObjectType.GROUP):
        yield from (f"{folder}/{name}" for name in _names(source, f"{group}/{folder}"))


def _name_parent(error: Exception) -> str:
    """Return the path of the file whose defaults list an error of Hydra is about, if it says."""
    return next((match["parent"] for match in _PARENT.finditer(str(error))), "")
