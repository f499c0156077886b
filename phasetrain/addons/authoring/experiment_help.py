"""What `phasetrain help NAME` says about an experiment; without torch and without reading YAML."""

from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from phasetrain.config.compose.folders import EXPERIMENT, PACKAGE, find_config_dir, list_options

DIRECTIVE = "@package"
"""Begin of a comment that is for Hydra."""


def experiment_help(name: str, config_dir: str | None = None) -> str:
    """Return the comment at the top of an experiment, how to run it and its file; empty if there is
    no experiment of this name.

    Args:
        name: as after `experiment=`.
        config_dir: folder of the user's configs; None: see `find_config_dir`.
    """
    folder = find_config_dir(config_dir)
    if name not in list_options(folder).get(EXPERIMENT, ()):
        return ""
    roots = [Path(str(files(PACKAGE))), *([Path(folder)] if folder is not None else [])]
    candidates = [root / EXPERIMENT / f"{name}.yaml" for root in roots]
    path = next(path for path in candidates if path.is_file())
    lines = [
        f"experiment {name}",
        *(f"  {line}" for line in _read_comment(path)),
        f"  use: phasetrain experiment={name}",
        f"  file: {path}",
    ]
    return "\n".join(lines)


def _read_comment(path: Path) -> list[str]:
    """Return the lines of the comment at the top of a file, without its marks."""
    top = takewhile(
        lambda line: line.startswith("#"), path.read_text("utf-8", errors="replace").splitlines()
    )
    lines = [line.removeprefix("#").removeprefix(" ").rstrip() for line in top]
    return [line for line in lines if line and not line.startswith(DIRECTIVE)]
