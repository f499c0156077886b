"""Images with masks, in two folders with equal names."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
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
from phasetrain.engine.batch import IGNORED
from phasetrain.errors import PhasetrainError

MASK_EXTENSIONS = (".png", ".npy", ".bmp", ".tif", ".tiff", ".gif")
"""Extensions of masks: formats without loss."""


@DATASETS.register("image_mask_folder")
class ImageMaskFolder(Dataset[dict[str, Tensor]]):
    """Images under `path/images` and masks of the same name, without extension, under `path/masks`,
    at any depth; samples are ordered by name.

    A sample is a mapping: `image`, float32 `(C, H, W)` in [0, 1], and `mask`, the class of each
    pixel, int64 `(H, W)`: the value of a grey image or the index of a color table, or an array of
    integers in a `.npy` file. Names that start with a dot are skipped.

    Args:
        path: folder with the two folders.
        images: name of the folder of images.
        masks: name of the folder of masks.
        classes: number of classes; None: the number of `class_names`.
        class_names: name of each class.
        ignore: value of pixels that do not count, which becomes -100; None: there is none.
        mode: `RGB` (C = 3) or `L` (grey, C = 1), to which images are converted.

    Raises:
        ConfigError: Pillow is not installed.
        ValueError: a folder is missing or empty, an image has no mask or a mask no image, or the
            number of classes is not given.
        PhasetrainError: on access: a file cannot be decoded, its mask has another size, or a pixel
            is outside the classes.
    """

    field_kinds: ClassVar[Mapping[str, str]] = {"image": "image", "mask": "mask"}

    def __init__(
        self,
        path: str,
        images: str = "images",
        masks: str = "masks",
        classes: int | None = None,
        class_names: Sequence[str] | None = None,
        ignore: int | None = 255,
        mode: Mode = "RGB",
    ) -> None:
        check_mode(mode, None)
        import_pillow("image_mask_folder")
        if classes is None and class_names is None:
            raise ValueError("classes = None: set the number of classes, or class_names")
        self.path = path
        self.mode: Mode = mode
        self.ignore = ignore
        self.class_names = None if class_names is None else tuple(class_names)
        self.classes = len(self.class_names or ()) if classes is None else classes
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise ValueError(
                f"classes = {self.classes}: there are {len(self.class_names)} class_names; "
                "expected one for each class"
            )
        image_files = _list_files(Path(path, images), EXTENSIONS)
        drawn = _list_files(Path(path, masks), MASK_EXTENSIONS)
        _check_pairs(image_files, drawn, path)
        self.samples = [(image_files[name], drawn[name]) for name in sorted(image_files)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image_file, mask_file = self.samples[index]
        try:
            image = decode_image(str(image_file), self.mode)
            mask = self._read_mask(mask_file)
        except (OSError, ValueError) as error:
            raise PhasetrainError(
                f"sample {index} ({image_file}): {error}", code="data.unreadable_sample"
            ) from error
        if image.shape[1:] != mask.shape:
            raise PhasetrainError(
                f"sample {index} ({image_file}) has {image.shape[1]} x {image.shape[2]} pixels, "
                f"and its mask {mask_file.name} {mask.shape[0]} x {mask.shape[1]}",
                code="data.unreadable_sample",
            )
        return {"image": image, "mask": mask}

    def facts(self) -> Mapping[str, Any]:
        """Return `classes`, `class_names` if there are any, and `channels`."""
        facts: dict[str, Any] = {"classes": self.classes, "channels": CHANNELS[self.mode]}
        if self.class_names is None:
            return facts
        return facts | {"class_names": self.class_names}

    def fingerprint(self) -> str:
        """Return the SHA-256 over the ordered names and sizes in bytes of all files."""
        digest = sha256()
        for pair in self.samples:
            for file in pair:
                # Relative paths and sizes, as for other folders of images.
                name = file.relative_to(self.path).as_posix()
                digest.update(f"{name}\0{file.stat().st_size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _read_mask(self, file: Path) -> Tensor:
        values = _read_classes(file)
        if values.ndim != 2 or values.dtype.kind not in "iub":
            raise ValueError(
                f"the mask {file.name} is {values.dtype} {values.shape}, expected one class per "
                "pixel: a grey image or one with a color table, or an array of integers (H, W)"
            )
        mask = torch.from_numpy(values.astype(np.int64))
        counted = torch.ones_like(mask, dtype=torch.bool)
        if self.ignore is not None:
            counted = mask != self.ignore
        outside = counted & ((mask < 0) | (mask >= self.classes))
        if bool(outside.any()):
            raise ValueError(
                f"the mask {file.name} has a pixel of class {int(mask[outside][0])}, and there are "
                f"{self.classes} classes, from 0; set classes, or `ignore` if it does not count"
            )
        return mask.masked_fill(~counted, IGNORED)


def _read_classes(file: Path) -> np.ndarray[Any, np.dtype[Any]]:
    if file.suffix.lower() == ".npy":
        # Without pickle, because a pickled object could execute code.
        array: np.ndarray[Any, np.dtype[Any]] = np.load(file, allow_pickle=False)
        return array
    from PIL import Image

    try:
        with Image.open(file) as opened:
            # Not converted: the values of a color table are classes, and not colors.
            return np.array(opened)
    # Pillow reports broken PNG files by SyntaxError.
    except (SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"the mask {file.name} cannot be decoded: {error}") from error


def _list_files(folder: Path, extensions: Sequence[str]) -> dict[str, Path]:
    """Return name without extension -> file, of all files below a folder."""
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {str(folder)!r}; expected images/ and masks/ with equal names in "
            "path, or set images and masks"
        )
    files: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        below = file.relative_to(folder)
        if file.suffix.lower() not in extensions or any(part[0] == "." for part in below.parts):
            continue
        name = below.with_suffix("").as_posix()
        if name in files:
            raise ValueError(f"{files[name]} and {file}: expected one file of a name")
        files[name] = file
    if not files:
        raise ValueError(
            f"the folder {str(folder)!r} has no files ending in {' '.join(extensions)}"
        )
    return files


def _check_pairs(images: Mapping[str, Path], masks: Mapping[str, Path], path: str) -> None:
    for name, file in images.items():
        if name not in masks:
            raise ValueError(f"path = {path!r}: the image {file.name} has no mask of its name")
    for name, file in masks.items():
        if name not in images:
            raise ValueError(f"path = {path!r}: the mask {file.name} has no image of its name")
