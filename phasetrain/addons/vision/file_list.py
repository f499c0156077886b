"""Images whose paths and labels are listed in files."""

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.datasets.images import (
    CHANNELS,
    Mode,
    check_mode,
    decode_image,
    import_pillow,
)
from phasetrain.errors import PhasetrainError


@DATASETS.register("file_list")
class FileList(Dataset[tuple[Tensor, Any]]):
    """Images by a list of their paths, with a list of labels.

    Inputs are float32 `(C, H, W)` in [0, 1]. Targets are int for a list of classes, float32 `(K,)`
    for a table `(N, K)`, such as several labels per image, and None without labels.

    Args:
        images: list of paths of images: `.npy`, `.json`, or a text file with one per line. Relative
            paths are relative to the folder of the list.
        labels: list of one label per image in one of these formats: classes as integers from 0, as
            names, or a table of numbers; None: no labels.
        replace_prefix: two texts: paths that begin with the first begin with the second instead.
        size: height and width to which each image is resized (bilinear, antialiased), in pixels;
            None keeps it.
        mode: `RGB` (C = 3) or `L` (grey, C = 1), to which images are converted.
        class_names: fixed order of classes given as names; None sorts the names that occur.
        classes: number of classes given as integers; None: one more than the largest.
        local_copy: folder, such as one on a local disk, to which each image is copied when it is
            first read, and from which it is read afterwards; None: no copies.

    Raises:
        ConfigError: Pillow is not installed.
        ValueError: a list cannot be read, is empty, or has another length than the other one; a
            label is not among the classes.
        PhasetrainError: on access, a file cannot be decoded.
    """

    def __init__(  # noqa: PLR0913 - the keys of a config, all but one with a default
        self,
        images: str,
        labels: str | None = None,
        replace_prefix: Sequence[str] | None = None,
        size: int | None = None,
        mode: Mode = "RGB",
        class_names: Sequence[str] | None = None,
        classes: int | None = None,
        *,
        local_copy: str | None = None,
    ) -> None:
        check_mode(mode, size)
        import_pillow("file_list")
        if replace_prefix is not None and len(replace_prefix) != 2:
            raise ValueError(f"replace_prefix = {list(replace_prefix)}: expected two texts")
        self.size = size
        self.mode: Mode = mode
        self.folder = Path(images).parent
        self.paths = _replace_prefix(_read_list(images, "images"), replace_prefix)
        self.class_names = tuple(class_names or ())
        self.classes = classes
        self.local_copy = local_copy
        self.targets: NDArray[Any] | None = None
        if labels is not None:
            self.targets = self._number_labels(_read_list(labels, "labels"))
            if len(self.targets) != len(self.paths):
                raise ValueError(
                    f"labels = {labels!r}: it has {len(self.targets)} entries for "
                    f"{len(self.paths)} images; expected one per image"
                )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        # An absolute path replaces the folder.
        file = os.path.join(self.folder, self.paths[index])  # noqa: PTH118 - Path costs 5 us
        try:
            image = decode_image(self._copy_locally(file), self.mode, self.size)
        except (OSError, ValueError) as error:
            raise PhasetrainError(
                f"sample {index} ({file}) {error}", code="data.unreadable_sample"
            ) from error
        if self.targets is None:
            return image, None
        if self.targets.ndim == 2:
            return image, torch.from_numpy(self.targets[index])
        return image, int(self.targets[index])

    def _copy_locally(self, file: str) -> str:
        """Return the path of the local copy of a file, or the file itself."""
        if self.local_copy is None:
            return file
        name = sha256(file.encode(errors="surrogateescape")).hexdigest()
        copy = Path(self.local_copy, name + Path(file).suffix)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Under another name first: workers and ranks may copy the same file at the same time.
            with NamedTemporaryFile(dir=copy.parent, delete=False) as part:
                part.write(Path(file).read_bytes())
            Path(part.name).replace(copy)
        return str(copy)

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            ValueError: there are no classes.
        """
        if self.targets is None or self.targets.ndim == 2:
            raise ValueError("a list without labels, or with a table of them, has no classes")
        return self.targets

    def facts(self) -> Mapping[str, Any]:
        """Return `channels` and, if they are known, `classes`, `class_names` and `input_shape`."""
        channels = CHANNELS[self.mode]
        facts: dict[str, Any] = {"channels": channels}
        if self.classes is not None:
            facts["classes"] = self.classes
        if self.class_names:
            facts["class_names"] = self.class_names
        if self.size is not None:
            facts["input_shape"] = (channels, self.size, self.size)
        return facts

    def fingerprint(self) -> str:
        """Return the SHA-256 over the ordered paths and labels; images are not read."""
        digest = sha256()
        for path in self.paths:
            digest.update(f"{path}\0".encode(errors="surrogateescape"))
        if self.targets is not None:
            digest.update(np.ascontiguousarray(self.targets).data)
        return digest.hexdigest()

    def _number_labels(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return classes as int64 `(N,)`, or a table as float32 `(N, K)`, and set the classes."""
        if labels.ndim == 2 and labels.shape[1] > 1:
            self.classes = self.classes or labels.shape[1]
            return labels.astype(np.float32)
        labels = labels.reshape(len(labels))
        if labels.dtype.kind in "iu":
            classes: NDArray[Any] = labels.astype(np.int64)
            self.classes = self.classes or int(classes.max()) + 1
            if not -1 <= int(classes.min()) <= int(classes.max()) < self.classes:
                raise ValueError(
                    f"classes = {self.classes}: labels are {classes.min()} to {classes.max()}; "
                    "expected 0 to classes - 1, or -1 for samples that count nowhere"
                )
            return classes
        names = [str(label) for label in labels]
        self.class_names = self.class_names or tuple(sorted(set(names)))
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if unknown := sorted(set(names) - set(numbers)):
            raise ValueError(f"class_names: {unknown[0]!r} occurs in labels, and is not among them")
        self.classes = len(self.class_names)
        return np.array([numbers[name] for name in names], dtype=np.int64)


def _read_list(path: str, key: str) -> NDArray[Any]:
    """Return the entries of a list; nothing is unpickled."""
    file = Path(path)
    try:
        if file.suffix == ".npy":
            entries: NDArray[Any] = np.load(file, allow_pickle=False)
        elif file.suffix == ".json":
            entries = np.array(json.loads(file.read_text()))
        else:
            entries = np.array(file.read_text().splitlines())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key} = {path!r} cannot be read: {error}; expected .npy with an array of texts or "
            "numbers, .json with a list, or lines of text"
        ) from error
    if entries.dtype == object or entries.ndim not in (1, 2) or len(entries) == 0:
        raise ValueError(f"{key} = {path!r}: expected a list with one entry per image")
    return entries


def _replace_prefix(paths: NDArray[Any], prefixes: Sequence[str] | None) -> list[str]:
    new_paths = [str(path) for path in paths.reshape(len(paths), -1)[:, 0]]
    if prefixes is None:
        return new_paths
    before, after = prefixes
    for at, path in enumerate(new_paths):
        if path.startswith(before):
            new_paths[at] = after + path.removeprefix(before)
    return new_paths
