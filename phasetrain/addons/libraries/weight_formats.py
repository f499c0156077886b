"""Formats of weights of timm and of Hugging Face's libraries."""

import json
from collections.abc import Sequence
from hashlib import sha256

from phasetrain.models.sources.base import FORMATS, SourceContent, WeightSource
from phasetrain.models.sources.files import flatten_tensors, read_file
from phasetrain.models.sources.layouts import WHOLE, read_torch, select_state_dict
from phasetrain.runtime.format import join_first
from phasetrain.runtime.storage import Storage


@FORMATS.register("timm")
def read_timm(source: WeightSource, storage: Storage) -> SourceContent:
    """Return the weights in a timm checkpoint (`state_dict` or `state_dict_ema`), or in a folder of
    its hub."""
    if storage.list_names(source.path):
        return read_huggingface(source, storage)
    _, loaded, digest = read_file(source, storage, source.path)
    return SourceContent(
        flatten_tensors(select_state_dict(source, loaded)), "timm", digest, source.path
    )


@FORMATS.register("huggingface")
def read_huggingface(source: WeightSource, storage: Storage) -> SourceContent:
    """Return the weights in a folder in the layout of Hugging Face's libraries, in one file or in
    shards."""
    if source.which != "model":
        raise source.make_error("a folder of this kind has no averaged weights; set which=model")
    names = storage.list_names(source.path)
    if not names:
        return read_torch(source, storage)
    files = _find_weight_files(source, storage, names)
    tensors = {}
    digests = []
    for file in files:
        _, loaded, digest = read_file(source, storage, f"{source.path.rstrip('/')}/{file}")
        tensors.update(flatten_tensors(select_state_dict(source, loaded)))
        digests.append(digest)
    whole = digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()
    return SourceContent(tensors, "huggingface", whole, source.path)


def _find_weight_files(source: WeightSource, storage: Storage, names: Sequence[str]) -> list[str]:
    """Return the files with the weights of a Hugging Face folder."""
    for whole in WHOLE:
        if whole in names:
            return [whole]
        if (index := f"{whole}.index.json") in names:
            return _read_shard_index(source, storage, index, names)
    raise source.make_error(
        f"the folder has no {' or '.join(WHOLE)}; it contains {join_first(names, 10)}"
    )


def _read_shard_index(
    source: WeightSource, storage: Storage, index: str, names: Sequence[str]
) -> list[str]:
    try:
        content = json.loads(storage.read(f"{source.path.rstrip('/')}/{index}"))
        # Sorted, so that the digest does not depend on the order in the index.
        files = sorted(set(content["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise source.make_error(
            f"{index} cannot be read ({type(error).__name__}: {error})"
        ) from error
    # By the listing of the folder, so that each is a plain file name in it and no path out of it.
    if absent := [file for file in files if file not in names]:
        raise source.make_error(
            f"{index} lists {join_first(map(repr, absent), 3)}, which the folder does not contain"
        )
    return files
