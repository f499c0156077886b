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
from phasetrain.data.datasets.images import CHANNELS, EXTENSIONS, Mode, check_mode, decode, pillow
from phasetrain.errors import PhasetrainError, did_you_mean


@DATASETS.register("image_folder")
class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images under `path/class name/`, in any depth; samples are ordered by class, then by path.

    Inputs are float32 `(C, H, W)` in [0, 1], targets int. Names that start with a dot are passed
    over.

    Args:
        path: folder with one folder per class.
        size: height and width to which each image is resized (bilinear, antialiased), in pixels;
            None keeps it.
        mode: `RGB` (C = 3) or `L` (grey, C = 1); images are converted to it.
        class_names: fixes the order of the classes, so that a test split numbers them like the
            train split; one that has no folder here simply has no samples. None takes the folders,
            sorted by name.

    Raises:
        ConfigError: Pillow is not installed.
        ValueError: no folder at `path`, no classes in it, a class without images, or a folder that
            `class_names` does not list.
        PhasetrainError: on access, a file that cannot be decoded.
    """

    def __init__(
        self,
        path: str,
        size: int | None = None,
        mode: Mode = "RGB",
        class_names: Sequence[str] | None = None,
    ) -> None:
        check_mode(mode, size)
        pillow("image_folder")
        self.path = path
        self.size = size
        self.mode: Mode = mode
        folders = _class_folders(path)
        self.class_names = tuple(class_names or folders)
        _check_known(folders, self.class_names, path)
        self.samples = [
            (file, number)
            for number, name in enumerate(self.class_names)
            if name in folders
            for file in _images(path, name)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, target = self.samples[index]
        return self._decoded(index, os.path.join(self.path, file)), target  # noqa: PTH118 - Path costs 5 us a sample

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`."""
        return np.array([number for _, number in self.samples], dtype=np.int64)

    def facts(self) -> Mapping[str, Any]:
        """Return `classes`, `class_names`, `channels` and, where `size` is set, `input_shape`."""
        channels = CHANNELS[self.mode]
        found = {
            "classes": len(self.class_names),
            "class_names": self.class_names,
            "channels": channels,
        }
        if self.size is None:
            return found
        return found | {"input_shape": (channels, self.size, self.size)}

    def fingerprint(self) -> str:
        """Return the SHA-256 over the ordered samples: path below `path`, size in bytes, class."""
        digest = sha256()
        for file, number in self.samples:
            told = f"{file}\0{Path(self.path, file).stat().st_size}\0{number}\n"
            digest.update(told.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _decoded(self, index: int, file: str) -> Tensor:
        try:
            return decode(file, self.mode, self.size)
        except ValueError as error:
            raise PhasetrainError(
                f"sample {index} ({file}) {error}; repair the file or take it out of the folder"
            ) from error


def _class_folders(path: str) -> list[str]:
    root = Path(path)
    if not root.is_dir():
        raise ValueError(
            f"path = {path!r}: there is no such folder; give one that has a folder per class"
        )
    names = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if not names:
        raise ValueError(
            f"path = {path!r}: the folder has no folders in it; images are expected in one per class"
        )
    return names


def _check_known(folders: Sequence[str], class_names: Sequence[str], path: str) -> None:
    for name in folders:
        if name not in class_names:
            raise ValueError(
                f"path = {path!r}: the folder {name!r} is not among the {len(class_names)} class_names"
                f"{did_you_mean(name, class_names) or '; rename or remove it'}"
            )


def _images(path: str, name: str) -> list[str]:
    found = sorted(_walked(path, name))
    if not found:
        raise ValueError(
            f"path = {path!r}: the class folder {name!r} has no images; expected files ending in {' '.join(EXTENSIONS)}"
        )
    return found


def _walked(path: str, name: str) -> Iterator[str]:
    for folder, below, files in os.walk(Path(path, name), followlinks=True):
        below[:] = [entry for entry in below if not entry.startswith(".")]
        for file in files:
            if file.lower().endswith(EXTENSIONS) and not file.startswith("."):
                yield Path(folder, file).relative_to(path).as_posix()
