"""Reads files as samples of the dataset that a run was trained on: images, tensors and text."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasetrain.data.datasets.images import EXTENSIONS, Mode, decode_image, import_pillow
from phasetrain.data.datasets.text import ByteTokenizer
from phasetrain.errors import ConfigError, did_you_mean, is_out_of_memory

ARRAYS = (".npy", ".pt")
"""Extensions of files with tensors."""

TEXTS = (".txt", ".text")
"""Extensions of files with text."""

OF_BYTES = ("text", "alice")
"""Datasets whose samples are blocks of byte tokens."""


@dataclass(frozen=True)
class RawInput:
    """A sample before the transforms.

    Attributes:
        file: path of its file.
        index: position in the file.
        sample: as the dataset gives it.
    """

    file: str
    index: int
    sample: Any


@dataclass(frozen=True)
class InputReader:
    """Reads files as samples of a dataset.

    Attributes:
        section: config of the split whose dataset is imitated.
        facts: recorded facts about its data: `channels`, `input_shape`, `context`.
    """

    section: Mapping[str, Any]
    facts: Mapping[str, Any]

    @property
    def is_text(self) -> bool:
        """Whether samples are blocks of byte tokens."""
        return self.section.get("dataset") in OF_BYTES

    def read(self, paths: Sequence[str]) -> list[RawInput]:
        """Return the samples in files; a folder means the images in it.

        Raises:
            ConfigError: a file does not exist, is of no known kind, or cannot be read.
        """
        found = []
        for path in paths:
            for file in _list_files(path):
                samples = self._read_file(file)
                found += [RawInput(file, index, one) for index, one in enumerate(samples)]
        return found

    def _read_file(self, file: str) -> Sequence[Any]:
        suffix = Path(file).suffix.lower()
        if Path(file).is_dir():
            raise ConfigError(
                f"{file}: this is a folder; expected files", code="predict.unreadable"
            )
        if not Path(file).exists():
            near = did_you_mean(Path(file).name, sorted(_list_siblings(file))) or "."
            raise ConfigError(f"{file}: there is no such file{near}", code="predict.unreadable")
        try:
            if suffix in EXTENSIONS and not self.is_text:
                return [self._read_image(file)]
            if suffix in ARRAYS:
                return self._split_array(_read_array(file))
            if self.is_text:
                return [self._read_bytes(Path(file).read_bytes())]
            if suffix in TEXTS and "channels" not in self.facts:
                return Path(file).read_text().splitlines()
        except (OSError, ValueError, RuntimeError, EOFError) as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{file}: cannot be read: {error}", code="predict.unreadable"
            ) from error
        known = ", ".join((*EXTENSIONS, *ARRAYS, *TEXTS))
        raise ConfigError(
            f"{file}: no file for the dataset {self.section.get('dataset')!r} of the run; expected "
            f"one of {known}",
            code="predict.unknown_kind",
        )

    def _read_image(self, file: str) -> Tensor:
        import_pillow("predict")
        mode: Mode = "RGB"
        # Datasets without a mode, such as idx, have the channels of their files.
        if self.section.get("mode") == "L" or (
            "mode" not in self.section and self.facts.get("channels") == 1
        ):
            mode = "L"
        size = self.section.get("size")
        if not isinstance(size, int):
            size = None  # the parameter of another dataset
        return decode_image(file, mode, size)

    def _read_bytes(self, content: bytes) -> Tensor:
        """Return the last tokens of a text, which predict the next one."""
        tokens = ByteTokenizer().encode(content)[:-1]  # without the end of the document
        context = self.facts.get("context")
        if not len(tokens):
            raise ValueError("it is empty")
        if isinstance(context, int):
            tokens = tokens[-context:]  # the model has no positions for more
        return tokens

    def _split_array(self, values: Tensor) -> Sequence[Tensor]:
        """Return the samples of an array: one, or several along the first dimension."""
        if values.dtype == torch.float64:
            values = values.float()
        shape = self.facts.get("input_shape")
        if isinstance(shape, list) and values.ndim == len(shape):
            return [values]
        if not values.ndim:
            raise ValueError("it is a single number, expected a sample or a batch of samples")
        return list(values)


def _list_files(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [path]
    found = sorted(
        str(one) for one in Path(path).rglob("*") if one.suffix.lower() in (*EXTENSIONS, *ARRAYS)
    )
    if not found:
        raise ConfigError(
            f"{path}: there is no image and no tensor in this folder", code="predict.unreadable"
        )
    return found


def _read_array(file: str) -> Tensor:
    content = Path(file).read_bytes()
    # Both without pickle, because a pickled object could execute code.
    if file.lower().endswith(".npy"):
        return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # torch's message recommends to load the file without this protection
        raise ValueError("it is not a file of torch.save with a tensor") from error
    if not isinstance(found, Tensor):
        raise ValueError(  # noqa: TRY004 - bad data
            f"it contains {type(found).__name__}, expected a tensor"
        )
    return found


def _list_siblings(file: str) -> list[str]:
    parent = Path(file).parent
    if parent.is_dir():
        return [path.name for path in parent.iterdir() if path.is_file()]
    return []
