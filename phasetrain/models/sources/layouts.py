"""The formats of weights from elsewhere: plain files, VISSL and ClassyVision, timm, Hugging
Face."""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from phasetrain.errors import did_you_mean
from phasetrain.models.sources.base import FORMATS, Content, Source
from phasetrain.models.sources.files import flat, read_file
from phasetrain.runtime.format import join_first
from phasetrain.runtime.storage import Storage

WRAPPERS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "model": ("state_dict", "model", "model_state_dict"),
        "ema": ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema"),
    }
)
"""Keys under which training programs keep weights in a torch file, and their running mean."""

CLASSY = "classy_state_dict"
"""Key of VISSL's and ClassyVision's checkpoints."""

WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Files of a Hugging Face folder that hold everything; `NAME.index.json` in place of one lists its
pieces."""

CHECKPOINT = re.compile(r"p\d{4,}-s\d{8,}")
"""How names of checkpoint folders begin."""


def read(source: Source) -> Content:
    """Return what is in a source.

    Raises:
        ConfigError: it is not there, or cannot be read.
    """
    storage = source.storage()
    if not storage.exists(source.path):
        parent, _, name = source.path.rstrip("/").rpartition("/")
        near = did_you_mean(name, storage.list_names(parent or "."))
        raise source.refused(f"there is no such file or folder{near}")
    name = _recognised(source, storage) if source.format == "auto" else source.format
    return FORMATS.find(name, f"{source.where}.format")(source, storage)


def _recognised(source: Source, storage: Storage) -> str:
    names = storage.list_names(source.path)
    if not names:
        return "torch"
    if {"manifest.json", "checkpoints"} & set(names) or any(map(CHECKPOINT.match, names)):
        return "phasetrain"
    if _holds_model(names):
        return "huggingface"
    raise source.refused(
        f"the folder is neither a run, a checkpoint, nor one with {' or '.join(WHOLE)}; it holds "
        f"{join_first(names, 10)}"
    )


@FORMATS.register("torch")
def read_torch(source: Source, storage: Storage) -> Content:
    """Return the weights in a file that torch.save wrote, under the key that training programs use,
    or `source.key`.

    A file of VISSL or ClassyVision, or a safetensors file, is recognised.
    """
    kind, loaded, digest = read_file(source, storage, source.path)
    if CLASSY in loaded and source.key is None:
        return Content(_classy(source, loaded), "vissl", digest, source.path)
    return Content(flat(_state_dict(source, loaded)), kind, digest, source.path)


@FORMATS.register("safetensors")
def read_safetensors(source: Source, storage: Storage) -> Content:
    """Return the tensors in a safetensors file."""
    kind, loaded, digest = read_file(source, storage, source.path)
    if kind != "safetensors":
        raise source.refused(f"{source.where}.format = 'safetensors', and this is a {kind} file")
    return Content(flat(_state_dict(source, loaded)), kind, digest, source.path)


@FORMATS.register("vissl")
def read_vissl(source: Source, storage: Storage) -> Content:
    """Return the weights in a checkpoint of VISSL or ClassyVision; names begin with `trunk.` and
    `heads.`.

    Its layout: `classy_state_dict.base_model.model.{trunk, heads}`, and `ema_model` for the running
    mean.
    """
    _, loaded, digest = read_file(source, storage, source.path)
    if CLASSY not in loaded:
        raise source.refused(
            f"a checkpoint of VISSL has the key {CLASSY!r}, this file has {_keys(loaded)}"
        )
    return Content(_classy(source, loaded), "vissl", digest, source.path)


@FORMATS.register("timm")
def read_timm(source: Source, storage: Storage) -> Content:
    """Return the weights in a checkpoint of timm (`state_dict`, or `state_dict_ema`), or in a
    folder from its hub."""
    if storage.list_names(source.path):
        return read_huggingface(source, storage)
    _, loaded, digest = read_file(source, storage, source.path)
    return Content(flat(_state_dict(source, loaded)), "timm", digest, source.path)


@FORMATS.register("huggingface")
def read_huggingface(source: Source, storage: Storage) -> Content:
    """Return the weights in a folder as Hugging Face's libraries write it, in one file or in
    pieces."""
    if source.which != "model":
        raise source.refused("a folder of this kind has no averaged weights; set which=model")
    names = storage.list_names(source.path)
    if not names:
        return read_torch(source, storage)
    files = _pieces(source, storage, names)
    found = {}
    digests = []
    for file in files:
        _, loaded, digest = read_file(source, storage, f"{source.path.rstrip('/')}/{file}")
        found.update(flat(_state_dict(source, loaded)))
        digests.append(digest)
    whole = digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()
    return Content(found, "huggingface", whole, source.path)


def _holds_model(names: Sequence[str]) -> bool:
    return any(name in names or f"{name}.index.json" in names for name in WHOLE)


def _pieces(source: Source, storage: Storage, names: Sequence[str]) -> list[str]:
    """Return the files that hold the weights of a Hugging Face folder."""
    for whole in WHOLE:
        if whole in names:
            return [whole]
        if (index := f"{whole}.index.json") in names:
            return _listed(source, storage, index, names)
    raise source.refused(
        f"the folder has no {' or '.join(WHOLE)}; it holds {join_first(names, 10)}"
    )


def _listed(source: Source, storage: Storage, index: str, names: Sequence[str]) -> list[str]:
    try:
        content = json.loads(storage.read(f"{source.path.rstrip('/')}/{index}"))
        files = sorted(set(content["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise source.refused(f"{index} cannot be read ({type(error).__name__}: {error})") from error
    if absent := [
        file for file in files if file not in names
    ]:  # so each is a plain name in this very folder
        raise source.refused(
            f"{index} names {join_first(map(repr, absent), 3)}, which the folder does not hold"
        )
    return files


def _state_dict(source: Source, loaded: Any) -> Any:
    """Return the part of a file that holds the weights which are asked for."""
    if source.key is not None:
        return _below(source, loaded, source.key)
    for key in WRAPPERS[source.which]:
        if isinstance(loaded.get(key), Mapping):
            return loaded[key]
    if source.which == "ema":
        raise source.refused(
            f"the file has no averaged weights under {', '.join(WRAPPERS['ema'])}; it has {_keys(loaded)}. Set "
            f"{source.where}.key to where they are, or {source.where}.which=model"
        )
    return loaded


def _classy(source: Source, loaded: Mapping[str, Any]) -> dict[str, Any]:
    part = "base_model" if source.which == "model" else "ema_model"
    state = loaded[CLASSY].get(part) if isinstance(loaded[CLASSY], Mapping) else None
    for key in ("model", "module"):
        if isinstance(state, Mapping) and "trunk" not in state and key in state:
            state = state[key]
    if not isinstance(state, Mapping) or "trunk" not in state:
        raise source.refused(
            f"{CLASSY}.{part}.model.trunk is expected, and {CLASSY} has {_keys(loaded[CLASSY])}; "
            f"set {source.where}.key to where the weights are"
        )
    return flat({key: state[key] for key in ("trunk", "heads") if key in state})


def _below(source: Source, loaded: Any, key: str) -> Any:
    node = loaded
    done = list[str]()
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            at = ".".join(done) or "the file"
            near = did_you_mean(name, map(str, node)) if isinstance(node, Mapping) else ""
            raise source.refused(
                f"{source.where}.key = {key!r}: {at} has no {name!r}{near}; it has {_keys(node)}"
            )
        node = node[name]
        done.append(name)
    return node


def _keys(node: Any) -> str:
    if not isinstance(node, Mapping):
        return f"no keys, but {type(node).__name__}"
    return join_first(node, 10)
