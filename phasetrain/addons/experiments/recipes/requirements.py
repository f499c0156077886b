"""Check that the packages of a recipe are installed, and say how to install them."""

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from phasetrain.addons.experiments.recipes.recipe import Package, Recipe
from phasetrain.errors import ConfigError


def is_installed(package: Package) -> bool:
    """Return whether the file and the module of a package are there."""
    # Debian's database of packages is not asked: data that was copied by hand is as good.
    if package.file and not Path(package.file).exists():
        return False
    # find_spec does not import the module itself, which may take seconds
    return not package.module or find_spec(package.module.partition(".")[0]) is not None


def list_missing(recipe: Recipe) -> list[Package]:
    """Return the packages of a recipe that are not installed."""
    return [package for package in recipe.packages if not is_installed(package)]


def format_advice(missing: Sequence[Package]) -> str:
    """Return the commands that install the packages, as one sentence."""
    debian = [package.name for package in missing if package.kind == "debian"]
    pypi = [package.name for package in missing if package.kind == "pypi"]
    data = [package for package in missing if package.kind == "data"]
    steps = []
    if debian:
        steps.append(f"apt-get install {' '.join(debian)}")
    if pypi:
        steps.append(f"pip install {shlex.join(pypi)}")
    for package in data:
        if package.command:
            steps.append(package.command)
        else:
            steps.append(f"get {package.name} and put it at {package.file}")
    return ", and ".join(steps)


def require_packages(recipe: Recipe) -> None:
    """Check that everything a recipe needs is installed.

    Raises:
        ConfigError: something is missing; the message says how to install it.
    """
    missing = list_missing(recipe)
    if not missing:
        return
    names = ", ".join(package.name for package in missing)
    raise ConfigError(
        f"--recipe {recipe.name}: needs {names}; {format_advice(missing)}",
        code="recipe.missing_package",
    )
