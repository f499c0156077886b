"""The names of the checkpoints of the run that tests of damage look at, see `killed` in
conftest.py."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness import newest

from phasetrain.runtime.storage import Storage

NEWEST, PREVIOUS, OLDEST = "p0002-s00000002", "p0002-s00000001", "p0001-s00000002"


def newest_valid_name(folder: Path) -> str:
    """Return the name of the checkpoint that a resume would use."""
    return Path(newest(folder).path).name


def resign(folder: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> None:
    """Update the digests of a manifest to the files of its folder, as an attacker would."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())["body"]
    for name in body["files"]:
        body["files"][name] = {
            "size": (folder / name).stat().st_size,
            "digest": Storage().read_hashed(str(folder / name))[1],
        }
    change(body)
    digest = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"body": body, "digest": digest}))
