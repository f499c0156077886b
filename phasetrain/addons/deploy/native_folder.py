"""A model of transformers or timm as a folder that its library reads: `from_pretrained`,
`timm.create_model`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from phasetrain.addons.deploy.merge_adapters import remove_adapters
from phasetrain.app.load import load
from phasetrain.models.sources import parse_sources
from phasetrain.tasks import Task

LIBRARIES = ("transformers", "timm")
"""First names of models that have a format of their own."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Names of the files of a tokenizer in a folder of Hugging Face."""


def is_native(name: str) -> bool:
    """Return whether MODEL.name is a model of one of the libraries."""
    return name.partition(".")[0] in LIBRARIES


def make_native_files(
    checkpoint: str,
    config: Mapping[str, Any],
    weights: Any,
    *,
    trust: bool,
    merged: Mapping[str, Tensor] | None = None,
) -> dict[str, bytes]:
    """Return name -> content of the files of a folder.

    Args:
        checkpoint: path of the checkpoint.
        config: its config, whose MODEL.name is a model of `LIBRARIES`.
        weights: the trained weights, or an average of them, see `phasetrain.load`.
        trust: run the code that the config names.
        merged: weights with the adapters of the run merged into them; None without adapters.
    """
    task = load(checkpoint, weights=weights, device="cpu", trust=trust)
    if merged is not None:
        remove_adapters(task.model)
        task.model.load_state_dict(dict(merged))
    with TemporaryDirectory() as folder:
        if config["MODEL"]["name"].startswith("transformers."):
            _save_transformers(task, folder)
        else:
            _save_timm(task, folder)
        made = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
    for source in _list_tokenizer_folders(config):
        tokenizer_files = {
            name: source / name for name in TOKENIZER_FILES if (source / name).is_file()
        }
        if tokenizer_files:
            return {name: path.read_bytes() for name, path in tokenizer_files.items()} | made
    return made


def _save_transformers(task: Task, folder: str) -> None:
    model: Any = task.model
    names = task.class_names
    if names and model.config.num_labels == len(names):
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}
    model.save_pretrained(folder)


def _save_timm(task: Task, folder: str) -> None:
    from timm.models import save_for_hf

    labels = {"label_names": list(task.class_names)} if task.class_names else {}
    save_for_hf(task.model, folder, model_config=labels, safe_serialization=True)


def _list_tokenizer_folders(config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folders that may hold the tokenizer of a run: those that datasets name as their
    `tokenizer`, and those with the initial weights."""
    for section in config["DATA"].values():
        if isinstance(section, Mapping) and isinstance(section.get("tokenizer"), str):
            yield Path(section["tokenizer"])
        if isinstance(section, Mapping) and section.get("dataset") == "tokens":
            yield Path(section["path"])
    for source in parse_sources(config["MODEL"]["weights"]):
        yield Path(source.path)
