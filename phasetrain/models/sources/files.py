"""Reads a file of weights as data, safetensors or the output of torch.save, without executing
code."""

import io
import json
import re
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasetrain.errors import ConfigError, is_out_of_memory
from phasetrain.models.sources.base import WeightSource
from phasetrain.runtime.storage import Storage

DEPTH = 64
"""Maximum nesting depth of a torch file."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class WeightFile(NamedTuple):
    """The content of a file.

    Attributes:
        kind: `safetensors` or `torch`.
        loaded: tensors by name, or the object given to torch.save.
        digest: SHA-256 over the SHA-256 digests of its 64 MiB blocks.
    """

    kind: str
    loaded: Mapping[Any, Any]
    digest: str


def read_file(source: WeightSource, storage: Storage, path: str) -> WeightFile:
    """Return the content of a file; its first bytes determine the kind.

    Raises:
        ConfigError: it cannot be read, is damaged, or would have to execute code.
    """
    try:
        # Read once: what was hashed is what is loaded, even if the file is replaced meanwhile.
        content, digest = storage.read_hashed(path)
    except OSError as error:
        if is_out_of_memory(error):
            raise
        raise source.make_error(f"{path} cannot be read ({error.strerror or error})") from error
    if source.sha256:
        _check_digest(source, path, content)
    # A safetensors file begins with the length of a JSON header in 8 bytes, then the header.
    if content[8:9] == b"{":
        return WeightFile("safetensors", _load_safetensors(source, path, content), digest)
    return WeightFile("torch", _load_torch(source, path, content), digest)


def _check_digest(source: WeightSource, path: str, content: bytearray) -> None:
    if path != source.path:
        raise source.make_error(
            f"{source.where}.sha256 is of one file, and this is a folder; leave it out"
        )
    if (digest := sha256(content).hexdigest()) != source.sha256:
        raise source.make_error(
            f"its sha256 is {digest}, and {source.where}.sha256 = {source.sha256}; restore the "
            "file, or correct the digest",
            "weights.wrong_digest",
        )


def flatten_tensors(state: Any, prefix: str = "", depth: int = 0) -> dict[str, Tensor]:
    """Return the tensors in nested mappings by dotted path, skipping everything else."""
    if isinstance(state, Tensor):
        return {prefix: state.detach()}
    # A file can contain a mapping that contains itself.
    if not isinstance(state, Mapping) or depth > DEPTH:
        return {}
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        tensors |= flatten_tensors(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    return tensors


def _load_safetensors(source: WeightSource, path: str, content: bytearray) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        # Sorted, because the order in the file is not part of the format, and errors list names in
        # order.
        return dict(sorted(load(bytes(content)).items()))
    except (SafetensorError, json.JSONDecodeError, KeyError, ValueError, RuntimeError) as error:
        raise source.make_error(
            f"{path} is not a complete safetensors file ({error}); download it again"
        ) from error


def _load_torch(source: WeightSource, path: str, content: bytearray) -> Mapping[Any, Any]:
    """Return the object in a file written by torch.save.

    Only classes that torch considers data are instantiated, and argparse.Namespace, which timm puts
    into its checkpoints.
    """
    file = io.BytesIO(content)
    try:
        # torch.load does not verify the checksums in its files.
        if zipfile.is_zipfile(file):
            _verify_checksums(source, path, file)
        file.seek(0)
        # In a context, because the allowed classes are global to the process.
        with torch.serialization.safe_globals([Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # any other file can raise anything
        if is_out_of_memory(error):
            raise
        raise source.make_error(_explain_failure(path, error)) from error
    if not isinstance(loaded, Mapping):
        raise source.make_error(
            f"{path} contains {type(loaded).__name__}, not a mapping of names to tensors"
        )
    return loaded


def _verify_checksums(source: WeightSource, path: str, file: io.BytesIO) -> None:
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise source.make_error(
            f"{path} is damaged: the checksum of {damaged} does not match; download it again"
        )


def _explain_failure(path: str, error: Exception) -> str:
    match = _GLOBAL.search(str(error))
    if match is None:
        # The unpickler's words about other bytes say nothing to a user: `KeyError: 544502645`.
        return (
            f"{path} is neither a safetensors file nor written by torch.save; it may be "
            "incomplete, or a file of another kind"
        )
    return (
        f"{path} contains more than tensors, numbers, text, lists and mappings ({match[1]}), and "
        "reading it would execute code; if you trust it, save its weights alone with "
        "torch.save(model.state_dict(), ...) or safetensors.torch.save_file, and use that file"
    )


def without_tied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without those that share memory with an earlier one, as safetensors
    requires; the model ties them again when it loads."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.shape)
        # empty tensors all have the address 0, without sharing anything
        if not tensor.numel() or memory not in seen:
            kept[name] = tensor.contiguous()
        seen.add(memory)
    return kept
