"""A recipe, as its YAML file in `configs/recipes/` states it.

Everything down to the key `measured` is written by hand; `benchmarks/recipes.py` writes the rest.
"""

import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from types import MappingProxyType
from typing import Any

import yaml

from phasetrain.config.compose.folders import RECIPES
from phasetrain.errors import ConfigError, did_you_mean

STATUSES = ("run", "not_run_by_us")

SPREADS = 3.04
"""Standard deviations within which a value counts as within the spread: for five seeds this is the
95 % prediction interval of one more value, t(0.975, 4) * sqrt(1 + 1/5)."""

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
)
_CRITERION = re.compile(r"(>=|<=|>|<) *([-+.\deE]+)")
_KEYS = ("title", "data", "status", "packages", "paths", "variants", "measured")
_VARIANT_KEYS = ("title", "run", "metrics", "published", "tolerance")
_PACKAGE_KEYS = ("debian", "pypi", "data", "file", "module", "command")


@dataclass(frozen=True)
class Package:
    """Something that a recipe needs to be installed.

    Attributes:
        name: of the package, or of the data.
        kind: `debian`, `pypi` or `data`, which everybody gets for themselves.
        file: path that exists if it is there, or empty.
        module: Python module that can be imported if it is there, or empty.
        command: makes the data, or empty.
    """

    name: str
    kind: str
    file: str = ""
    module: str = ""
    command: str = ""


@dataclass(frozen=True)
class Criterion:
    """The value that a metric has to reach.

    Attributes:
        text: such as `>= 0.92`; empty for a metric that is only reported.
    """

    text: str = ""

    def is_met(self, value: float) -> bool:
        """Return whether a value reaches it; NaN never does."""
        match = _CRITERION.fullmatch(self.text)
        return match is None or _COMPARISONS[match[1]](value, float(match[2]))


@dataclass(frozen=True)
class Measurement:
    """The results of a variant, as measured.

    Attributes:
        date: day of the measurement, YYYY-MM-DD.
        values: metric -> value by seed, from seed 0.
        minutes: CPU time of one seed, on a core of `platform`.
        digests: SHA-256 of the weights by seed, from seed 0.
        first_epochs: the same after the first epoch of the first stage.
        platform: versions, threads and processor, on which bits depend.
        kills: number of updates after which seed 0 was killed and resumed, with equal digests.
    """

    date: str
    values: Mapping[str, Sequence[float]]
    minutes: float
    digests: Sequence[str]
    first_epochs: Sequence[str]
    platform: Mapping[str, Any]
    kills: Sequence[int] = ()

    def mean(self, metric: str) -> float:
        """Return the mean over the seeds."""
        return mean(self.values[metric])

    def spread(self, metric: str) -> float:
        """Return the standard deviation over the seeds, 0 for a single one."""
        values = self.values[metric]
        if len(values) < 2:
            return 0.0
        return stdev(values)


@dataclass(frozen=True)
class Variant:
    """One way to run a recipe.

    Attributes:
        recipe: name of the recipe.
        name: name within the recipe.
        title: one line.
        stages: name -> words of the command line. `{seed}` is replaced by the seed, and `{NAME}` by
            the run folder of an earlier stage. A single stage has an empty name.
        metrics: metric of the last stage, such as `test/accuracy` -> its criterion. The
            first one decides whether a repetition is within the spread.
        paths: keys with the places of the data, which everybody gives for themselves.
        published: a published number with its source, as text; empty if there is none.
        tolerance: difference of the first metric that counts as equal on another platform, however
            small the spread is.
        measured: its results; None: not measured yet.
    """

    recipe: str
    name: str
    title: str
    stages: Mapping[str, Sequence[str]]
    metrics: Mapping[str, Criterion]
    paths: Sequence[str] = ()
    published: str = ""
    tolerance: float = 0.0
    measured: Measurement | None = None

    @property
    def full_name(self) -> str:
        """Its name on the command line: `RECIPE/VARIANT`."""
        return f"{self.recipe}/{self.name}"

    @property
    def metric(self) -> str:
        """The first metric."""
        return next(iter(self.metrics))


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        name: name of its file.
        title: one line.
        data: one line on the data.
        status: `run`, or `not_run_by_us` if nothing is claimed.
        packages: packages and data that have to be installed.
        variants: by name; the first one is the default.
        baselines: name of something to compare with -> metric -> measured value.
    """

    name: str
    title: str
    data: str
    status: str
    packages: Sequence[Package]
    variants: Mapping[str, Variant]
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def find_files(config_dir: str | None = None) -> dict[str, Path]:
    """Return name -> file of every recipe: of the package, then of the user's folder of configs."""
    paths: dict[str, Path] = {}
    folders = [Path(str(files("phasetrain.configs")), RECIPES)]
    if config_dir is not None:
        folders.append(Path(config_dir, RECIPES))
    for folder in folders:
        # A later folder wins: users may replace a recipe of the package.
        paths |= {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return dict(sorted(paths.items()))


def read_recipes(config_dir: str | None = None) -> list[Recipe]:
    """Return all recipes by name.

    Raises:
        ConfigError: a file is not a recipe.
    """
    return [read_recipe(path) for path in find_files(config_dir).values()]


def find_variant(name: str, config_dir: str | None = None) -> tuple[Recipe, Variant]:
    """Return a recipe and a variant of it.

    Args:
        name: `RECIPE/VARIANT`, or `RECIPE` for its first variant.
        config_dir: folder with the user's configs.

    Raises:
        ConfigError: there is none with this name.
    """
    paths = find_files(config_dir)
    first, _, second = name.partition("/")
    if first not in paths:
        near = did_you_mean(first, paths) or ";"
        raise ConfigError(
            f"--recipe {name}: no such recipe{near} recipes: {', '.join(paths)}",
            code="recipe.unknown",
        )
    recipe = read_recipe(paths[first])
    if second and second not in recipe.variants:
        near = did_you_mean(second, recipe.variants) or ";"
        raise ConfigError(
            f"--recipe {name}: {first} has no such variant{near} variants: "
            f"{', '.join(recipe.variants)}",
            code="recipe.unknown",
        )
    return recipe, recipe.variants[second or next(iter(recipe.variants))]


def read_recipe(path: Path) -> Recipe:
    """Read a file.

    Raises:
        ConfigError: it is not a recipe; the message names the file and the key.
    """
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a YAML file ({error})", code="recipe.invalid") from error
    reader = _Reader(path)
    reader.check_keys("the file", content, _KEYS, required=("title", "data", "status", "variants"))
    if content["status"] not in STATUSES:
        raise reader.error("status", content["status"], f"one of {', '.join(STATUSES)}")
    if not isinstance(content["variants"], Mapping) or not content["variants"]:
        raise reader.error("variants", content["variants"], "a mapping of at least one variant")
    reader.paths = content.get("paths") or ()
    measured = content.get("measured") or {}
    results = measured.get("variants") or {}
    variants = {
        name: reader.read_variant(name, entry, results.get(name))
        for name, entry in content["variants"].items()
    }
    for name in results:
        if name not in variants:
            raise reader.error("measured.variants", name, f"one of {', '.join(variants)}")
    return Recipe(
        name=path.stem,
        title=content["title"],
        data=content["data"],
        status=content["status"],
        packages=[reader.read_package(entry) for entry in content.get("packages") or ()],
        variants=variants,
        baselines=measured.get("baselines") or {},
    )


class _Reader:
    """Reads the parts of a file.

    Args:
        path: the file, for messages.

    Attributes:
        paths: the key `paths` of the file, which all variants have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths: Sequence[str] = ()

    def error(self, key: str, value: Any, expected: str) -> ConfigError:
        """Return an error about a key."""
        return ConfigError(
            f"{self.path}: {key} = {value!r}: expected {expected}", code="recipe.invalid"
        )

    def check_keys(
        self, key_path: str, content: Any, allowed: Sequence[str], *, required: Sequence[str] = ()
    ) -> None:
        """Reject content that is not a mapping, unknown keys and missing keys."""
        if not isinstance(content, Mapping):
            raise self.error(key_path, content, "a mapping")
        for key in content:
            if key not in allowed:
                raise self.error(key_path, key, f"only the keys {', '.join(allowed)}")
        for key in required:
            if content.get(key) in (None, ""):
                raise self.error(f"{key_path}, key {key}", content.get(key), "a value")

    def read_package(self, content: Any) -> Package:
        """Read an entry of `packages`."""
        self.check_keys("packages", content, _PACKAGE_KEYS)
        kinds = [kind_key for kind_key in ("debian", "pypi", "data") if kind_key in content]
        if len(kinds) != 1:
            raise self.error("packages", content, "one of the keys debian, pypi and data")
        file = content.get("file", "")
        module = content.get("module", "")
        if not file and not module and kinds[0] != "data":
            raise self.error("packages", content, "a file or a module that shows that it is there")
        return Package(content[kinds[0]], kinds[0], file, module, content.get("command", ""))

    def read_variant(self, name: str, content: Any, measured: Any) -> Variant:
        """Read an entry of `variants` and its results."""
        key_path = f"variants.{name}"
        self.check_keys(key_path, content, _VARIANT_KEYS, required=("title", "run", "metrics"))
        stages = content["run"]
        if not isinstance(stages, Mapping):
            stages = {"": stages}
        if not isinstance(content["metrics"], Mapping):
            raise self.error(f"{key_path}.metrics", content["metrics"], "a mapping")
        metrics = {key: Criterion(text or "") for key, text in content["metrics"].items()}
        for key, criterion in metrics.items():
            if criterion.text and not _CRITERION.fullmatch(criterion.text):
                expected = "a text such as '>= 0.92', or null"
                raise self.error(f"{key_path}.metrics.{key}", criterion.text, expected)
        return Variant(
            recipe=self.path.stem,
            name=name,
            title=content["title"],
            stages={stage: shlex.split(words) for stage, words in stages.items()},
            metrics=metrics,
            paths=self.paths,
            published=content.get("published") or "",
            tolerance=content.get("tolerance") or 0.0,
            measured=self._read_measurement(name, metrics, measured),
        )

    def _read_measurement(
        self, name: str, metrics: Mapping[str, Criterion], content: Any
    ) -> Measurement | None:
        if not content:
            return None
        key_path = f"measured.variants.{name}"
        field_names = tuple(Measurement.__dataclass_fields__)
        self.check_keys(
            key_path,
            content,
            field_names,
            required=[name for name in field_names if name != "kills"],
        )
        if list(content["values"]) != list(metrics):
            expected = f"the metrics {', '.join(metrics)}"
            raise self.error(f"{key_path}.values", list(content["values"]), expected)
        return Measurement(**{**content, "date": str(content["date"])})
