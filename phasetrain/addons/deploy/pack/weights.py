"""Card and weights of a packed model, without its model."""

from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from phasetrain.addons.deploy.pack.archive import (
    CARD,
    CONFIG,
    WEIGHTS,
    make_damage_error,
    read_archive,
)


def read_pack(path: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Return the content of card.json, in which `run_config` is added, the config of the run, and
    name -> tensor.

    Raises:
        ConfigError: the file was changed after it was packed (codes of
            `phasetrain.addons.deploy.pack.archive`).
    """
    archive = read_archive(path)
    card, config = archive.parse_json(CARD), archive.parse_json(CONFIG)
    if not isinstance(card, dict) or not isinstance(config, dict):
        raise make_damage_error(path, f"{CARD} or {CONFIG} is not a JSON object")
    try:
        tensors = load(bytes(archive.find_member(WEIGHTS)))
    except SafetensorError as error:
        raise make_damage_error(path, f"{WEIGHTS} cannot be read: {error}") from error
    return {**card, "run_config": config}, tensors
