"""Results that depend on nothing but the installed code, kept on disk until the code changes.

Names, parameters and docstrings of all parts are such a result. It takes seconds to import them,
and torch with them, for a help text or a completion.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from phasetrain.config.addons import GROUP, OWN_PACKAGE
from phasetrain.config.plugins import PLUGINS
from phasetrain.runtime.storage.elsewhere import cache_folder

PACKAGE = Path(__file__).parents[2]


def compute_once(name: str, compute: Callable[[], Any]) -> Any:
    """Return a result that an earlier process has computed with the same code; else compute it.

    With parts of other packages it is computed each time: their code may change unnoticed.

    Args:
        name: name of the result, unique in the program.
        compute: returns the result, JSON data.
    """
    if _has_foreign_parts():
        return json.loads(json.dumps(compute()))
    digest = digest_code()
    stem = hashlib.sha256(f"{PACKAGE}\n{name}".encode()).hexdigest()[:32]
    path = cache_folder() / "results" / f"{stem}.json"
    # Whatever is wrong with a file of the cache, the result can be computed.
    with suppress(OSError, ValueError, LookupError, TypeError):
        stored = json.loads(path.read_text("utf-8"))
        if stored["code"] == digest:
            return stored["result"]
    text = json.dumps({"code": digest, "name": name, "result": compute()})
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a cache that cannot be written costs time only
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, "utf-8")
        part.replace(path)
    return json.loads(text)["result"]


def digest_code() -> str:
    """Return a digest of the files of phasetrain, their sizes and times, and of the versions of
    Python and torch."""
    lines = [sys.version, version("torch")]
    for path in sorted(PACKAGE.rglob("*.*")):
        if path.suffix != ".pyc":
            stat = path.stat()
            lines.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _has_foreign_parts() -> bool:
    """Return whether installed packages other than phasetrain may add or register parts."""
    points = [*entry_points(group=GROUP), *entry_points(group=PLUGINS)]
    return not all(point.module.startswith(f"{OWN_PACKAGE}.") for point in points)
