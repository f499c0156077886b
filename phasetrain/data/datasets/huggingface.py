"""Data sets of Hugging Face that were saved to a folder."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.data.datasets.base import DATASETS, Role
from phasetrain.data.datasets.images import Mode, pillow, pixels
from phasetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset as Rows


@DATASETS.register("huggingface")
class HuggingFace(Dataset[tuple[Any, Any]]):
    """The rows of a data set that `save_to_disk` of the library datasets has written; nothing is
    downloaded.

    Numbers and lists of numbers become tensors, int64 or float32; images become float32 `(C, H, W)`
    in [0, 1]; text stays text. Rows are read from the files where they are asked for.

    Args:
        path: the folder.
        split: which split of a folder that has several, by default that of the part which the data
            plays, `train` or `test`. Of a folder that has one, it has to be that one.
        input_key: column that is the input, or several, which make a mapping by name; None takes
            all but the target.
        target_key: column that is the target, or several; None gives the target None.
        mode: `RGB` or `L`, to which images are converted; None keeps what each is.
        classes: number of classes, where the target is no `ClassLabel`, which knows.

    Raises:
        ConfigError: the library is not installed.
        ValueError: no such folder, split or column; on access, an image that does not say which
            number is white.
    """

    def __init__(
        self,
        path: str,
        split: str | None = None,
        input_key: str | Sequence[str] | None = None,
        target_key: str | Sequence[str] | None = "label",
        mode: Mode | None = None,
        classes: int | None = None,
    ) -> None:
        rows = _rows(path, split)
        self.path = path
        self.classes = classes
        self.target_key = target_key
        targets = _columns(target_key)
        others = [one for one in rows.column_names if one not in targets]
        self.input_key = others if input_key is None else input_key
        taken = list(dict.fromkeys([*_columns(self.input_key), *targets]))
        for column in taken:
            if column not in rows.column_names:
                raise ValueError(
                    f"path = {path!r}: there is no column {column!r}{did_you_mean(column, rows.column_names) or '.'} "
                    f"It has {', '.join(rows.column_names)}"
                )
        self._class_names = _class_names(rows, target_key)
        rows, self._modes = _with_pillow(rows, taken, mode)
        self._rows: Rows = rows.with_format(
            "torch", columns=[one for one in taken if one not in self._modes]
        )
        self._pictures: Rows = rows.select_columns(list(self._modes))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = dict(self._rows[index])
        for name, picture in self._pictures[index].items() if self._modes else ():
            row[name] = None if picture is None else pixels(picture, self._modes[name])
        return _taken(row, self.input_key), _taken(row, self.target_key)

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            ValueError: the target is something else than one column of integers.
        """
        if not isinstance(self.target_key, str):
            raise ValueError(f"target_key = {self.target_key!r}: classes are those of one column")  # noqa: TRY004
        found = np.asarray(
            self._rows.with_format("numpy", columns=[self.target_key])[:][self.target_key]
        )
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError(
                f"target_key = {self.target_key!r}: its column holds something else than integers"
            )
        return found.astype(np.int64)

    def facts(self) -> Mapping[str, Any]:
        """Return `classes` and `class_names` as far as they are known."""
        if self._class_names:
            return {"classes": len(self._class_names), "class_names": self._class_names}
        if self.classes is None:
            return {}
        return {"classes": self.classes}

    def fingerprint(self) -> str:
        """Return the SHA-256 over columns, number of rows, and names and sizes of the files of data
        in order."""
        digest = sha256(f"{self._rows.features} {len(self)}".encode())
        for file in sorted({one["filename"] for one in self._rows.cache_files}):
            digest.update(
                f"{Path(file).name}\0{Path(file).stat().st_size}\n".encode(errors="surrogateescape")
            )
        return digest.hexdigest()


def _rows(path: str, split: str | None) -> "Rows":
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "data set 'huggingface' needs the library datasets, which is not installed; "
            'run: pip install "phasetrain[datasets]"'
        ) from error
    if not Path(path).is_dir():
        raise ValueError(
            f"path = {path!r}: there is no such folder; give one that `save_to_disk` has written"
        )
    try:
        found = datasets.load_from_disk(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"path = {path!r}: the folder is none that `save_to_disk` has written"
        ) from error
    if isinstance(found, datasets.Dataset):
        if split is not None and not isinstance(split, Role) and split != str(found.split):
            told = "without a name" if found.split is None else f"{str(found.split)!r}"
            raise ValueError(
                f"split = {split!r}: the folder holds one split, {told}; leave `split` out, or name its own"
            )
        return found
    if split not in found:
        raise ValueError(
            f"split = {split!r}: the data set has no such split{did_you_mean(str(split), found) or '.'} "
            f"It has {', '.join(found)}"
        )
    return found[split]


def _with_pillow(
    rows: "Rows", taken: Sequence[str], mode: Mode | None
) -> tuple["Rows", dict[str, str | None]]:
    """Return the rows with images as they are in the files, and the mode that those of each column
    are to have."""
    from datasets import Image

    modes: dict[str, str | None] = {
        name: mode or feature.mode
        for name in taken
        if isinstance(feature := rows.features[name], Image)
    }
    if modes:
        pillow("huggingface")
    for name in modes:
        rows = rows.cast_column(name, Image())
    return rows, modes


def _class_names(rows: "Rows", target: str | Sequence[str] | None) -> tuple[str, ...]:
    from datasets import ClassLabel

    feature = rows.features[target] if isinstance(target, str) else None
    if isinstance(feature, ClassLabel):
        return tuple(feature.names)
    return ()


def _columns(key: str | Sequence[str] | None) -> list[str]:
    if key is None:
        return []
    if isinstance(key, str):
        return [key]
    return list(key)


def _taken(row: Mapping[str, Any], key: str | Sequence[str] | None) -> Any:
    if key is None or isinstance(key, str):
        if key is None:
            return None
        return row[key]
    return {name: row[name] for name in key}
