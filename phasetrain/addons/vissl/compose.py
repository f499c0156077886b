"""Reading of VISSL's configs: files, merged over VISSL's defaults."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from phasetrain.config.nested import leaves
from phasetrain.errors import ConfigError


class VisslConfig:
    """A config of VISSL that remembers which keys were read.

    Args:
        given: key -> value of the files, without the leading `config.`.

    Attributes:
        given: the same.
        read: keys that have been asked for.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.read: set[str] = set()
        self._assumed: set[str] = set()
        tree: dict[str, Any] = {}
        # Copies: values of two configs must not be the same objects.
        for key, value in deepcopy({**read_defaults(), **self.given}).items():
            _set(tree, key, value)
        self._tree = tree

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value: of the files, else of VISSL's defaults, else `default`."""
        self.read.add(key)
        value: Any = self._tree
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        # VISSL's files write null for "the default of the code".
        if value is None:
            return default
        return value

    def has(self, prefix: str) -> bool:
        """Return whether the files set a key, or one below it, or it is assumed."""
        keys = (*self.given, *self._assumed)
        return any(key == prefix or key.startswith(f"{prefix}.") for key in keys)

    def assume(self, key: str, value: Any) -> None:
        """Set a key that the files leave to another one."""
        _set(self._tree, key, value)
        self._assumed.add(key)

    @property
    def is_feature_extractor(self) -> bool:
        """Whether VISSL freezes the trunk, in test mode, and pools features of its layers."""
        settings = "MODEL.FEATURE_EVAL_SETTINGS"
        freezes = [f"{settings}.FREEZE_TRUNK_ONLY", f"{settings}.FREEZE_TRUNK_AND_HEAD"]
        return bool(
            self.get(f"{settings}.EVAL_MODE_ON")
            and any(self.get(key) for key in freezes)
            and self.get(f"{settings}.LINEAR_EVAL_FEAT_POOL_OPS_MAP")
        )

    @property
    def loads_head(self) -> bool:
        """Whether VISSL loads the weights of the head, too, from PARAMS_FILE."""
        settings = "MODEL.FEATURE_EVAL_SETTINGS"
        return not self.get(f"{settings}.EVAL_MODE_ON") or bool(
            self.get(f"{settings}.EVAL_TRUNK_AND_HEAD")
        )

    @property
    def is_extraction(self) -> bool:
        """Whether features are extracted, for a probe or for files, and nothing is trained."""
        # Benchmarks on features, such as SVMs, set no engine: they have neither loss nor optimizer.
        engine = str(self.get("engine_name"))
        return engine.startswith("extract") or not (self.has("OPTIMIZER") or self.has("LOSS"))

    def is_changed(self, key: str) -> bool:
        """Return whether the files set a key to something else than VISSL's default."""
        # A file that repeats a default needs nothing here, whether or not there is a counterpart.
        return key in self.given and self.given[key] != read_defaults().get(key)


@cache
def read_defaults() -> dict[str, Any]:
    """Return VISSL's defaults: key -> value."""
    text = files(__package__).joinpath("vissl_defaults.yaml").read_text()
    defaults: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[assignment]
    return defaults


def read_vissl(words: Sequence[str | Path], folder: str | Path | None = None) -> VisslConfig:
    """Return the config that files, or the words of VISSL's command line, describe.

    Args:
        words: files, a base and the files merged over it, in this order; or `config=NAME`,
            `+config/GROUP=NAME`, `config.A.B=VALUE` and `hydra.verbose=true`. Overrides of keys
            are merged last, as VISSL does.
        folder: VISSL's folder `configs`, for names; None: `configs` in the current folder.

    Raises:
        ConfigError: a file cannot be read, or is not a config of VISSL, or a word is neither.
    """
    tree: dict[str, Any] = {}
    overrides: list[tuple[str, Any]] = []
    for word in map(str, words):
        key, is_override, value = word.partition("=")
        key = key.lstrip("+")
        if not is_override:
            _merge(tree, _read_file(word))
        elif key == "config" or key.startswith("config/"):
            group = key.removeprefix("config").strip("/")
            _merge(tree, _read_file(_find_config(f"{group}/{value}".strip("/"), folder, word)))
        elif key.startswith("config.") or key == "engine_name":
            overrides.append((key.removeprefix("config."), _parse_value(value, word)))
        elif not key.startswith("hydra."):
            raise ConfigError(
                f"migrate vissl {word}: expected a file, config=NAME, +config/GROUP=NAME or "
                "config.KEY=VALUE, as on VISSL's command line",
                code="config.unknown_key",
            )
    if not tree and not overrides:
        raise ConfigError(
            "migrate vissl: no config is given; expected a file or config=NAME",
            code="config.required",
        )
    for key, value in overrides:
        _merge(tree, _nest(key, value))
    return VisslConfig(leaves(tree))


def _find_config(name: str, folder: str | Path | None, word: str) -> Path:
    """Return the file of a config, whose name is its path below VISSL's `configs/config`."""
    folders = [Path(folder)] if folder is not None else [Path("configs"), Path(), Path("..")]
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    for parent in folders:
        for path in (parent / "config" / file, parent / file, parent / "configs" / "config" / file):
            if path.is_file():
                return path
    raise ConfigError(
        f"migrate vissl {word}: {file} is not in {folders[0] / 'config'}; give VISSL's folder "
        "`configs` with --configs DIR",
        code="file.not_found",
    )


def _parse_value(text: str, word: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(
            f"migrate vissl {word}: the value cannot be read: {error}; expected YAML",
            code="config.wrong_type",
        ) from error


def _nest(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    nested: dict[str, Any] = value
    return nested


def _read_file(path: str | Path) -> dict[str, Any]:
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(
            f"migrate vissl {path}: cannot be read: {error}; expected a YAML file",
            code="file.unreadable",
        ) from error
    config = content.get("config") if isinstance(content, dict) else None
    if not isinstance(config, dict):
        raise ConfigError(
            f"migrate vissl {path}: expected a mapping `config`, as in VISSL's configs",
            code="config.wrong_type",
        )
    # The one key of VISSL outside of `config`.
    if "engine_name" in content:
        config["engine_name"] = content["engine_name"]
    return config


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        below = tree.get(parent)
        if not isinstance(below, dict):
            below = tree[parent] = {}
        tree = below
    # The keys below a mapping are listed by themselves, and may have been set before it.
    if isinstance(value, dict) and isinstance(tree.get(last), dict):
        return
    tree[last] = value
