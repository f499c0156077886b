"""Formats of weights from other programs: plain files, VISSL and ClassyVision; and which format a
folder has."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phasetrain.errors import did_you_mean
from phasetrain.models.sources.base import FORMATS, SourceContent, WeightSource
from phasetrain.models.sources.files import flatten_tensors, read_file
from phasetrain.runtime.format import join_first
from phasetrain.runtime.storage import Storage

WRAPPERS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "model": ("state_dict", "model", "model_state_dict"),
        "ema": ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema"),
    }
)
"""Keys of the weights, and of their moving average, in torch files of training programs."""

CLASSY = "classy_state_dict"
"""Key in checkpoints of VISSL and ClassyVision."""

WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Files with all weights of a Hugging Face folder; `NAME.index.json` instead lists their shards."""

CHECKPOINT = re.compile(r"p\d{4,}-s\d{8,}")
"""Beginning of the name of a checkpoint folder."""


def read_source(source: WeightSource) -> SourceContent:
    """Return the content of a source.

    Raises:
        ConfigError: it does not exist, or cannot be read.
    """
    storage = source.check_exists()
    name = _detect_format(source, storage) if source.format == "auto" else source.format
    return FORMATS.find(name, f"{source.where}.format")(source, storage)


def _detect_format(source: WeightSource, storage: Storage) -> str:
    names = storage.list_names(source.path)
    if not names and not _is_folder(source, storage):
        return "torch"
    # By the names of the files alone: nothing is opened before the format is known.
    if {"manifest.json", "checkpoints"} & set(names) or any(map(CHECKPOINT.match, names)):
        return "phasetrain"
    if _holds_model(names):
        return "huggingface"
    content = f"contains {join_first(names, 10)}" if names else "is empty"
    raise source.make_error(
        f"the folder is not a run or a checkpoint, and has no {' or '.join(WHOLE)}; it {content}"
    )


def _is_folder(source: WeightSource, storage: Storage) -> bool:
    return storage.keeps_files and Path(storage.local_path(source.path)).is_dir()


@FORMATS.register("torch")
def read_torch(source: WeightSource, storage: Storage) -> SourceContent:
    """Return the weights in a file written by torch.save, under one of the usual keys or
    `source.key`.

    A file of VISSL or ClassyVision, or a safetensors file, is detected.
    """
    file_format, loaded, digest = read_file(source, storage, source.path)
    if CLASSY in loaded and source.key is None:
        return SourceContent(_read_classy(source, loaded), "vissl", digest, source.path)
    return SourceContent(
        flatten_tensors(select_state_dict(source, loaded)), file_format, digest, source.path
    )


@FORMATS.register("safetensors")
def read_safetensors(source: WeightSource, storage: Storage) -> SourceContent:
    """Return the tensors in a safetensors file."""
    file_format, loaded, digest = read_file(source, storage, source.path)
    if file_format != "safetensors":
        raise source.make_error(
            f"{source.where}.format = 'safetensors': this is a {file_format} file"
        )
    return SourceContent(
        flatten_tensors(select_state_dict(source, loaded)), file_format, digest, source.path
    )


@FORMATS.register("vissl")
def read_vissl(source: WeightSource, storage: Storage) -> SourceContent:
    """Return the weights in a checkpoint of VISSL or ClassyVision; names begin with `trunk.` and
    `heads.`.

    Its layout: `classy_state_dict.base_model.model.{trunk, heads}`, and `ema_model` for the moving
    average.
    """
    _, loaded, digest = read_file(source, storage, source.path)
    if CLASSY not in loaded:
        raise source.make_error(
            f"a checkpoint of VISSL has the key {CLASSY!r}, this file has {_describe_keys(loaded)}"
        )
    return SourceContent(_read_classy(source, loaded), "vissl", digest, source.path)


def _holds_model(names: Sequence[str]) -> bool:
    return any(name in names or f"{name}.index.json" in names for name in WHOLE)


def select_state_dict(source: WeightSource, loaded: Any) -> Any:
    """Return the part of a file with the requested weights."""
    if source.key is not None:
        return _lookup(source, loaded, source.key)
    for key in WRAPPERS[source.which]:
        if isinstance(loaded.get(key), Mapping):
            return loaded[key]
    if source.which == "ema":
        raise source.make_error(
            f"the file has no averaged weights under {', '.join(WRAPPERS['ema'])}; it has "
            f"{_describe_keys(loaded)}. Set {source.where}.key to where they are, or "
            f"{source.where}.which=model"
        )
    return loaded


def _read_classy(source: WeightSource, loaded: Mapping[str, Any]) -> dict[str, Any]:
    part = "base_model" if source.which == "model" else "ema_model"
    state = loaded[CLASSY].get(part) if isinstance(loaded[CLASSY], Mapping) else None
    # Depending on the version and on DDP, the weights are one or two levels deeper.
    for key in ("model", "module"):
        if isinstance(state, Mapping) and "trunk" not in state and key in state:
            state = state[key]
    if not isinstance(state, Mapping) or "trunk" not in state:
        raise source.make_error(
            f"{CLASSY}.{part}.model.trunk is expected, and {CLASSY} has "
            f"{_describe_keys(loaded[CLASSY])}; set {source.where}.key to where the weights are"
        )
    return flatten_tensors({key: state[key] for key in ("trunk", "heads") if key in state})


def _lookup(source: WeightSource, loaded: Any, key: str) -> Any:
    node = loaded
    done = list[str]()
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            at = ".".join(done) or "the file"
            near = did_you_mean(name, map(str, node)) if isinstance(node, Mapping) else ""
            raise source.make_error(
                f"{source.where}.key = {key!r}: {at} has no {name!r}{near}; it has "
                f"{_describe_keys(node)}"
            )
        node = node[name]
        done.append(name)
    return node


def _describe_keys(node: Any) -> str:
    if not isinstance(node, Mapping):
        return f"no keys, but {type(node).__name__}"
    return join_first(node, 10)
