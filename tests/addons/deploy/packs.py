"""Changes of a packed model with digests that fit, as somebody makes them who knows the format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phasetrain.addons.deploy.pack.archive import encode_archive, read_archive


def repack(
    path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None]
) -> Path:
    """Write a packed model again after a change of its index and its members."""
    archive = read_archive(str(path))
    index = {key: value for key, value in archive.index.items() if key != "files"}
    members = {name: bytes(content) for name, content in archive.members.items()}
    change(index, members)
    out.write_bytes(encode_archive(index, members))
    return out


def change_config(members: dict[str, bytes], **sections: Any) -> None:
    """Change values in sections of the packed config."""
    config = json.loads(members["config.json"])
    for section, values in sections.items():
        config[section] |= values
    members["config.json"] = json.dumps(config).encode()
