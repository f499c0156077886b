"""Scenes of cut-out pictures on photographs, with the mask of the pasted pictures."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from phasetrain.config.checks import check_at_least
from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.datasets.images import import_pillow
from phasetrain.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

CLASS_FOLDERS: Mapping[str, Sequence[str]] = {
    "animal": ("animals",),
    "thing": ("vehicles", "military", "town", "household", "hobbies"),
}
"""Class -> folders of Tux Paint's stamps."""

WITHOUT = ("LadyBird.jpg",)
"""Backgrounds that show an animal."""

TEST_EVERY = 4
"""Every fourth stamp and background, in the order of names, is only in the test split."""

LEAST_COLORS = 800
"""Distinct colors, of the 4,096 pixels of a small copy, that tell a photograph from a drawing."""


@DATASETS.register("stamps")
class Stamps(Dataset[dict[str, Tensor]]):
    """Scenes of one or two cut-out pictures of Tux Paint on photographs of the MATE desktop.

    A sample is a mapping: `image`, float32 `(3, size, size)` in [0, 1], and `mask`, int64 `(size,
    size)`: 0 background, 1 animal, 2 thing (vehicles, buildings, tools, instruments). Most
    cut-outs are photographs; drawings in few colors are left out. Scenes are a function of `seed`,
    `split` and index. No cut-out and no background is in both splits. The
    pictures are in Debian's packages tuxpaint-stamps-default and mate-backgrounds.

    Args:
        split: `train` or `test`.
        samples: number of scenes; None: 2,000 to train and 500 to test.
        size: height and width, in pixels.
        seed: seed of the scenes, independent of RUN.seed.
        stamps: folder of the stamps.
        backgrounds: folder of the backgrounds.

    Raises:
        ConfigError: a package is not installed.
        ValueError: another split, or a size below 8.
    """

    field_kinds: ClassVar[Mapping[str, str]] = {"image": "image", "mask": "mask"}

    def __init__(
        self,
        split: Literal["train", "test"] = "train",
        samples: int | None = None,
        size: int = 64,
        seed: int = 0,
        stamps: str = "/usr/share/tuxpaint/stamps",
        backgrounds: str = "/usr/share/backgrounds/mate/nature",
    ) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split = {split!r}: expected train or test")
        check_at_least(8, size=size)
        check_at_least(1, samples=samples)
        import_pillow("stamps")
        _require_folder(stamps, "tuxpaint-stamps-default")
        _require_folder(backgrounds, "mate-backgrounds")
        self.split = split
        self.size = size
        self.seed = seed
        self._digest = sha256(f"{split} {size} {seed}\n".encode())
        is_test = split == "test"
        self._samples = samples or (500 if is_test else 2000)
        self._cutouts = [
            [
                _read_cutout(file, size)
                for file in _select_split(_list_photographs(Path(stamps), folders), is_test=is_test)
            ]
            for folders in CLASS_FOLDERS.values()
        ]
        files = [
            file for file in sorted(Path(backgrounds).glob("*.jpg")) if file.name not in WITHOUT
        ]
        self._backgrounds = [
            _read_background(file, 3 * size) for file in _select_split(files, is_test=is_test)
        ]
        if not self._backgrounds or not all(self._cutouts):
            raise ValueError(
                f"stamps = {stamps!r}, backgrounds = {backgrounds!r}: a folder has too few pictures"
            )
        for picture in (
            *self._backgrounds,
            *(cutout for group in self._cutouts for cutout in group),
        ):
            self._digest.update(picture.tobytes())

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(f"index {index}: there are {self._samples} scenes")
        # A generator per scene, so that a scene does not depend on the ones read before it.
        draws = np.random.default_rng([self.seed, index, self.split == "test"])
        scene = self._crop_background(draws)
        mask = np.zeros((self.size, self.size), dtype=np.int64)
        for _ in range(int(draws.integers(1, 3))):
            self._paste_cutout(scene, mask, draws)
        image = torch.from_numpy(np.array(scene)).permute(2, 0, 1).contiguous()
        return {"image": image.float().div_(255), "mask": torch.from_numpy(mask)}

    def facts(self) -> Mapping[str, Any]:
        """Return `classes`, `class_names`, `channels` and `input_shape`."""
        names = ("background", *CLASS_FOLDERS)
        shape = (3, self.size, self.size)
        return {"classes": len(names), "class_names": names, "channels": 3, "input_shape": shape}

    def fingerprint(self) -> str:
        """Return the SHA-256 over parameters and decoded pictures."""
        return self._digest.hexdigest()

    def _crop_background(self, draws: np.random.Generator) -> "Image":
        picture = self._backgrounds[int(draws.integers(len(self._backgrounds)))]
        side = int(draws.integers(self.size, min(picture.size) + 1))
        left = int(draws.integers(0, picture.width - side + 1))
        top = int(draws.integers(0, picture.height - side + 1))
        box = (left, top, left + side, top + side)
        return picture.resize((self.size, self.size), box=box)

    def _paste_cutout(
        self, scene: "Image", mask: np.ndarray[Any, np.dtype[np.int64]], draws: np.random.Generator
    ) -> None:
        """Paste a random picture into a scene, and its class into the mask."""
        number = int(draws.integers(len(self._cutouts)))
        group = self._cutouts[number]
        picture = group[int(draws.integers(len(group)))]
        scale = self.size * draws.uniform(0.4, 0.9) / max(picture.size)
        wide = max(1, round(picture.width * scale))
        tall = max(1, round(picture.height * scale))
        picture = picture.resize((wide, tall))
        # The center is always in the scene; up to a half may be cut off.
        left = int(draws.integers(0, self.size)) - wide // 2
        top = int(draws.integers(0, self.size)) - tall // 2
        scene.paste(picture, (left, top), picture)
        covered = np.asarray(picture)[..., 3] > 127
        rows = slice(max(top, 0), min(top + tall, self.size))
        columns = slice(max(left, 0), min(left + wide, self.size))
        seen_rows = slice(rows.start - top, rows.stop - top)
        seen_columns = slice(columns.start - left, columns.stop - left)
        mask[rows, columns][covered[seen_rows, seen_columns]] = number + 1


def _require_folder(path: str, package: str) -> None:
    if not Path(path).is_dir():
        raise ConfigError(
            f"the dataset 'stamps' reads {path}, and there is no such folder; run: apt-get install "
            f"{package}, or name a folder with its pictures",
            code="config.missing_library",
        )


def _list_photographs(root: Path, folders: Sequence[str]) -> list[Path]:
    """Return the cut-out photographs in folders, in the order of their names."""
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.png"))]
    return [file for file in files if _is_cut_out_photograph(file)]


def _is_cut_out_photograph(file: Path) -> bool:
    from PIL import Image

    with Image.open(file) as opened:
        if opened.mode not in ("RGBA", "LA") or min(opened.size) < 100:
            return False
        small = np.asarray(opened.convert("RGBA").resize((64, 64)))
    colors = len(np.unique(small[..., :3].reshape(-1, 3), axis=0))
    is_cut_out = (small[..., 3] < 10).mean() > 0.05 and (small[..., 3] > 245).mean() > 0.08
    return bool(is_cut_out) and colors > LEAST_COLORS


def _select_split(files: Sequence[Path], *, is_test: bool) -> list[Path]:
    return [
        file
        for number, file in enumerate(files)
        if (number % TEST_EVERY == TEST_EVERY - 1) == is_test
    ]


def _read_cutout(file: Path, size: int) -> "Image":
    """Return a picture with its transparency, cropped to its visible part."""
    from PIL import Image

    with Image.open(file) as opened:
        picture = opened.convert("RGBA")
    picture = picture.crop(picture.getchannel("A").getbbox())
    # Larger copies would take memory for pixels that no scene shows.
    picture.thumbnail((size, size))
    return picture


def _read_background(file: Path, height: int) -> "Image":
    from PIL import Image

    with Image.open(file) as opened:
        opened.draft("RGB", (height, height))  # decodes a JPEG at a fraction of its size
        picture = opened.convert("RGB")
    return picture.resize((round(picture.width * height / picture.height), height))
