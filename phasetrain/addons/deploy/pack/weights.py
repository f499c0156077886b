"""Card and weights of a packed model, without its model."""

from collections.abc import Mapping
from typing import Any

from safetensors.torch import load
from torch import Tensor

from phasetrain.addons.deploy.pack.archive import CARD, CONFIG, WEIGHTS, read_archive


def read_pack(path: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Return the content of card.json, in which `run_config` is added, the config of the run, and
    name -> tensor.

    Raises:
        ConfigError: the file was changed after it was packed (codes of
            `phasetrain.addons.deploy.pack.archive`).
    """
    archive = read_archive(path)
    card = archive.parse_json(CARD)
    card["run_config"] = archive.parse_json(CONFIG)
    return card, load(bytes(archive.find_member(WEIGHTS)))
