"""Reading one file of weights as data: safetensors, or what torch.save wrote, of which nothing is
ever executed."""

import io
import json
import re
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasetrain.errors import ConfigError
from phasetrain.models.sources.base import Source
from phasetrain.runtime.storage import Storage

DEPTH = 64
"""Levels of nesting of a torch file that are looked at."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class File(NamedTuple):
    """The content of a file.

    Attributes:
        kind: `safetensors` or `torch`.
        loaded: tensors by name, or what torch.save was given.
        digest: SHA-256 over the SHA-256 digests of its 64 MiB blocks.
    """

    kind: str
    loaded: Mapping[Any, Any]
    digest: str


def read_file(source: Source, storage: Storage, path: str) -> File:
    """Return the content of a file; which kind it is, its first bytes tell.

    Raises:
        ConfigError: it cannot be read, is damaged, or would have to execute code.
    """
    try:
        content, digest = storage.read_hashed(path)
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise source.refused(f"{path} cannot be read ({reason})") from error
    if content[8:9] == b"{":
        return File("safetensors", _safetensors(source, path, content), digest)
    return File("torch", _torch(source, path, content), digest)


def flat(state: Any, prefix: str = "", depth: int = 0) -> dict[str, Tensor]:
    """Return the tensors in nested mappings by the dotted path to each; what is no tensor is left
    out."""
    if isinstance(state, Tensor):
        return {prefix: state.detach()}
    if not isinstance(state, Mapping) or depth > DEPTH:
        return {}
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    return found


def _safetensors(source: Source, path: str, content: bytearray) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(sorted(load(bytes(content)).items()))
    except (SafetensorError, json.JSONDecodeError, KeyError, ValueError, RuntimeError) as error:
        raise source.refused(
            f"{path} is no whole safetensors file ({error}); get it again from where it came"
        ) from error


def _torch(source: Source, path: str, content: bytearray) -> Mapping[Any, Any]:
    """Return what torch.save wrote.

    Of classes only those that torch takes for data are made, and argparse.Namespace, which timm
    puts into its checkpoints. Torch itself does not compare the checksums that stand in its files.
    """
    file = io.BytesIO(content)
    try:
        if zipfile.is_zipfile(file):
            _check_sums(source, path, file)
        file.seek(0)
        with torch.serialization.safe_globals([Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # what is no such file can raise anything
        raise source.refused(_not_loaded(path, error)) from error
    if not isinstance(loaded, Mapping):
        raise source.refused(
            f"{path} holds no mapping of names to tensors, but {type(loaded).__name__}"
        )
    return loaded


def _check_sums(source: Source, path: str, file: io.BytesIO) -> None:
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise source.refused(
            f"{path} is damaged: the checksum of {damaged} does not fit; get it again"
        )


def _not_loaded(path: str, error: Exception) -> str:
    found = _GLOBAL.search(str(error))
    if found is None:
        first = next(iter(str(error).strip().splitlines()), "")
        return f"{path} is neither a safetensors file nor one that torch.save wrote ({type(error).__name__}: {first})"
    return (
        f"{path} holds more than tensors, numbers, text, lists and mappings ({found[1]}), and reading it would execute "
        "code; where you trust it, write its weights alone with torch.save(model.state_dict(), ...) or "
        "safetensors.torch.save_file, and name that file"
    )
