"""Folders of configs: where they are, and which options they hold, without reading them."""

from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

PACKAGE = "phasetrain.configs"
EXPERIMENT = "experiment"
RECIPES = "recipes"
"""Folder among the configs that is no group: the facts of recipes."""

FOUND_DIRS = ("configs", "conf")
"""Folders of configs that are found by themselves in the current folder; the first one is used."""


def is_file_word(word: str) -> bool:
    """Return whether a word of the command line is the path of an experiment file."""
    return word.endswith((".yaml", ".yml")) and "=" not in word and not word.startswith("~")


def list_file_folders(words: Iterable[str]) -> list[str]:
    """Return the folders of the experiment files that the words of a command name by their path."""
    return [str(Path(word).resolve().parent) for word in words if is_file_word(word)]


def find_config_dir(config_dir: str | None, overrides: Sequence[str] = ()) -> str | None:
    """Return the user's folder of configs: the given one, else the one above the folder
    `experiment` of an experiment file, else `configs` or `conf` in the current folder.

    Args:
        config_dir: value of `--config-dir`.
        overrides: words of the command line.
    """
    if config_dir is not None:
        return config_dir
    for word in filter(is_file_word, overrides):
        for parent in Path(word).parents:
            if parent.name == EXPERIMENT:
                return str(parent.parent)
    return next((name for name in FOUND_DIRS if _holds_options(Path(name))), None)


def _holds_options(folder: Path) -> bool:
    """Return whether a folder has experiments or options of a section; the package's own folder,
    which `configs` is in a clone of the source, does not count."""
    own = Path(str(files(PACKAGE)))
    if not folder.is_dir() or folder.resolve() == own.resolve():
        return False
    return any(
        child.is_dir() and (child.name == EXPERIMENT or child.name.isupper())
        for child in folder.iterdir()
    )


def list_options(config_dir: str | None) -> dict[str, list[str]]:
    """Return group -> names of its options, in order, of the package and of the user's folder;
    `experiment` comes first."""
    options: dict[str, set[str]] = {}
    roots = [Path(str(files(PACKAGE)))]
    if config_dir is not None:
        roots.append(Path(config_dir))
    for root in roots:
        for path in root.glob("*/**/*.yaml"):
            group, *name = path.relative_to(root).with_suffix("").parts
            options.setdefault(group, set()).add("/".join(name))
    options.pop(RECIPES, None)
    groups = sorted(options, key=lambda group: (group != EXPERIMENT, group))
    return {group: sorted(options[group]) for group in groups}
