"""Start a project: an experiment, parts with a test, and the schema for editors."""

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from phasetrain.addons.authoring.editor.schema import make_schema, write_schema
from phasetrain.errors import ConfigError

SCHEMA_FILE = "phasetrain.json"
"""Name of the schema, which the first line of the experiment refers to."""

_NOT_IN_MODULE = re.compile(r"\W")


def create_project(path: str) -> list[str]:
    """Write the files of a new project, and return their paths.

    Args:
        path: folder; it may exist, but none of the files.

    Raises:
        ConfigError: the path ends like a file, one of the files exists, or the folder cannot be
            written.
    """
    folder = Path(path)
    # Otherwise somebody who wants one file would get a folder with the name of a file.
    if folder.suffix in (".py", ".yaml", ".yml"):
        raise ConfigError(
            f"phasetrain new {path}: expected a folder, in which the files of a project are "
            f"written; leave out {folder.suffix!r}",
            code="file.not_a_folder",
        )
    texts = _fill_templates(folder.resolve().name)
    existing = [name for name in (*texts, SCHEMA_FILE) if (folder / name).exists()]
    if existing:
        raise ConfigError(
            f"phasetrain new {path}: {', '.join(existing)} exists; expected a new folder, or one "
            "without these files",
            code="file.exists",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        # Last, since it is made from the experiment and the parts.
        schema = make_schema([str(folder / next(iter(texts)))])
        write_schema(schema, folder / SCHEMA_FILE)
    except OSError as error:
        raise ConfigError(
            f"phasetrain new {path}: {error.strerror}: {error.filename}; expected a folder that "
            "can be written",
            code="file.not_writable",
        ) from error
    return [str(folder / name) for name in (*texts, SCHEMA_FILE)]


def _fill_templates(name: str) -> Mapping[str, str]:
    """Return name of a file -> its text, the experiment first."""
    # Not only `parts`: modules of the same name in two projects would hide each other.
    module = f"{_NOT_IN_MODULE.sub('_', name)}_parts"
    names = {
        f"{name}.yaml": "experiment.txt",
        f"{module}.py": "parts.txt",
        f"test_{module}.py": "test_parts.txt",
        ".gitignore": "gitignore.txt",
    }
    templates = files("phasetrain.addons.authoring.new")
    return {
        file: templates.joinpath(template)
        .read_text("utf-8")
        .replace("@NAME@", name)
        .replace("@MODULE@", module)
        for file, template in names.items()
    }
