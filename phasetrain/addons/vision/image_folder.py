"""Images in folders, one folder per class."""

import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.datasets.images import (
    CHANNELS,
    EXTENSIONS,
    Mode,
    check_mode,
    decode_image,
    import_pillow,
)
from phasetrain.errors import PhasetrainError, did_you_mean


@DATASETS.register("image_folder")
class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images under `path/class name/`, at any depth; samples are ordered by class, then by path.

    Inputs are float32 `(C, H, W)` in [0, 1], targets int. Names that start with a dot are skipped.

    Args:
        path: folder with one folder per class.
        size: height and width to which each image is resized (bilinear, antialiased), in pixels;
            None keeps it.
        mode: `RGB` (C = 3) or `L` (grey, C = 1), to which images are converted.
        class_names: fixed order of the classes, so that a test split numbers them like the train
            split; a class without a folder has no samples. None uses the folders, sorted by name.

    Raises:
        ConfigError: Pillow is not installed.
        ValueError: `path` is not a folder, has no classes, a class has no images, or `class_names`
            lacks a folder.
        PhasetrainError: on access, a file cannot be decoded.
    """

    def __init__(
        self,
        path: str,
        size: int | None = None,
        mode: Mode = "RGB",
        class_names: Sequence[str] | None = None,
    ) -> None:
        check_mode(mode, size)
        import_pillow("image_folder")
        self.path = path
        self.size = size
        self.mode: Mode = mode
        folders = _list_class_folders(path)
        self.class_names = tuple(class_names or folders)
        _check_class_names(folders, self.class_names, path)
        self.samples = [
            (file, number)
            for number, name in enumerate(self.class_names)
            if name in folders
            for file in _list_images(path, name)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, target = self.samples[index]
        whole = os.path.join(self.path, file)  # noqa: PTH118 - Path costs 5 us a sample
        return self._decode_image(index, whole), target

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`."""
        return np.array([number for _, number in self.samples], dtype=np.int64)

    def facts(self) -> Mapping[str, Any]:
        """Return `classes`, `class_names`, `channels` and, if `size` is set, `input_shape`."""
        channels = CHANNELS[self.mode]
        facts = {
            "classes": len(self.class_names),
            "class_names": self.class_names,
            "channels": channels,
        }
        if self.size is None:
            return facts
        return facts | {"input_shape": (channels, self.size, self.size)}

    def fingerprint(self) -> str:
        """Return the SHA-256 over the ordered samples: path below `path`, size in bytes, class."""
        digest = sha256()
        for file, number in self.samples:
            # Relative paths and sizes: the fingerprint survives a move of the folder, and no image
            # is read.
            line = f"{file}\0{Path(self.path, file).stat().st_size}\0{number}\n"
            # surrogateescape, because names of files may be arbitrary bytes.
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _decode_image(self, index: int, file: str) -> Tensor:
        try:
            return decode_image(file, self.mode, self.size)
        except ValueError as error:
            raise PhasetrainError(
                f"sample {index} ({file}) {error}", code="data.unreadable_sample"
            ) from error


def _list_class_folders(path: str) -> list[str]:
    root = Path(path)
    if not root.is_dir():
        raise ValueError(
            f"path = {path!r}: there is no such folder; expected one with a folder per class"
        )
    names = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not names:
        raise ValueError(f"path = {path!r}: the folder has no subfolders; expected one per class")
    return names


def _check_class_names(folders: Sequence[str], class_names: Sequence[str], path: str) -> None:
    for name in folders:
        if name not in class_names:
            raise ValueError(
                f"path = {path!r}: the folder {name!r} is not among the {len(class_names)} "
                f"class_names{did_you_mean(name, class_names) or '; rename or remove it'}"
            )


def _list_images(path: str, name: str) -> list[str]:
    # Sorted, because file systems list a folder in different orders, and an index must always mean
    # the same sample.
    images = sorted(_walk_images(path, name))
    if not images:
        raise ValueError(
            f"path = {path!r}: the class folder {name!r} has no images; expected files ending in "
            f"{' '.join(EXTENSIONS)}"
        )
    return images


def _walk_images(path: str, name: str) -> Iterator[str]:
    for folder, below, files in os.walk(Path(path, name), followlinks=True):
        # In place, because os.walk descends into the folders that remain in this list.
        below[:] = [entry for entry in below if not entry.startswith(".")]
        for file in files:
            if file.lower().endswith(EXTENSIONS) and not file.startswith("."):
                yield Path(folder, file).relative_to(path).as_posix()
