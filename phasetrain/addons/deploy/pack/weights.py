"""Card and weights of a packed model, without its model."""

from collections.abc import Mapping
from typing import Any

from safetensors.torch import load
from torch import Tensor

from phasetrain.addons.deploy.pack.archive import read_archive
from phasetrain.addons.deploy.pack.load_pack import CARD, WEIGHTS


def read_pack(path: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Return the content of card.json, and name -> tensor.

    Raises:
        ConfigError: the file was changed after it was packed (codes of
            `phasetrain.addons.deploy.pack.archive`).
    """
    archive = read_archive(path)
    return archive.parse_json(CARD), load(bytes(archive.find_member(WEIGHTS)))
