"""Hugging Face datasets that were saved to a folder."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.data.datasets.base import DATASETS, Role
from phasetrain.data.datasets.images import Mode, import_pillow, to_tensor
from phasetrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset as Rows


@DATASETS.register("huggingface")
class HuggingFace(Dataset[tuple[Any, Any]]):
    """The rows of a dataset written by `save_to_disk` of the datasets library; nothing is
    downloaded.

    Numbers and lists of numbers become tensors, int64 or float32; images become float32 `(C, H, W)`
    in [0, 1]; text stays text. Rows are read from the files on access.

    Args:
        path: the folder.
        split: split of a folder that has several, by default the purpose of the data, `train` or
            `test`. If the folder has one split, its name.
        input_key: column with the input, or several, which become a mapping; None uses all except
            the target.
        target_key: column with the target, or several; None sets the target to None.
        mode: `RGB` or `L`, to which images are converted; None keeps the mode of each image.
        classes: number of classes if the target is not a `ClassLabel`, which knows it.

    Raises:
        ConfigError: the library is not installed.
        ValueError: there is no such folder, split or column; on access, an image whose white level
            is unknown.
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
        rows = _load_rows(path, split)
        self.path = path
        self.classes = classes
        self.target_key = target_key
        targets = _list_columns(target_key)
        others = [column for column in rows.column_names if column not in targets]
        self.input_key = others if input_key is None else input_key
        taken = list(dict.fromkeys([*_list_columns(self.input_key), *targets]))
        for column in taken:
            if column not in rows.column_names:
                near = did_you_mean(column, rows.column_names) or "."
                raise ValueError(
                    f"path = {path!r}: there is no column {column!r}{near} "
                    f"It has {', '.join(rows.column_names)}"
                )
        self._class_names = _find_class_names(rows, target_key)
        rows, self._modes = _defer_decoding(rows, taken, mode)
        self._rows: Rows = rows.with_format(
            "torch", columns=[column for column in taken if column not in self._modes]
        )
        # The torch format would turn images into tensors itself, so they are read from a second
        # view without a format.
        self._pictures: Rows = rows.select_columns(list(self._modes))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = dict(self._rows[index])
        for name, picture in self._pictures[index].items() if self._modes else ():
            row[name] = None if picture is None else to_tensor(picture, self._modes[name])
        return _select_columns(row, self.input_key), _select_columns(row, self.target_key)

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, int64 `(N,)`.

        Raises:
            ValueError: the target is not a single column of integers.
        """
        if not isinstance(self.target_key, str):
            raise ValueError(  # noqa: TRY004 - a value of the config
                f"target_key = {self.target_key!r}: classes need a single target column"
            )
        labels = np.asarray(
            self._rows.with_format("numpy", columns=[self.target_key])[:][self.target_key]
        )
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"target_key = {self.target_key!r}: expected a column of integers")
        return labels.astype(np.int64)

    def facts(self) -> Mapping[str, Any]:
        """Return `classes` and `class_names` if known."""
        if self._class_names:
            return {"classes": len(self._class_names), "class_names": self._class_names}
        if self.classes is None:
            return {}
        return {"classes": self.classes}

    def fingerprint(self) -> str:
        """Return the SHA-256 over columns, number of rows, and names and sizes of the data files in
        order."""
        digest = sha256(f"{self._rows.features} {len(self)}".encode())
        # Names and sizes only: hashing the content would read the whole dataset at each start.
        for file in sorted({entry["filename"] for entry in self._rows.cache_files}):
            digest.update(
                f"{Path(file).name}\0{Path(file).stat().st_size}\n".encode(errors="surrogateescape")
            )
        return digest.hexdigest()


def _load_rows(path: str, split: str | None) -> "Rows":
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "the dataset 'huggingface' needs the datasets library, which is not installed; "
            'run: pip install "phasetrain[datasets]"',
            code="config.missing_library",
        ) from error
    if not Path(path).is_dir():
        raise ValueError(
            f"path = {path!r}: there is no such folder; expected one written by `save_to_disk`"
        )
    try:
        loaded = datasets.load_from_disk(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"path = {path!r}: the folder was not written by `save_to_disk`"
        ) from error
    if isinstance(loaded, datasets.Dataset):
        if split is not None and not isinstance(split, Role) and split != str(loaded.split):
            name = "without a name" if loaded.split is None else f"{str(loaded.split)!r}"
            raise ValueError(
                f"split = {split!r}: the folder contains one split, {name}; omit `split`, or use "
                "that name"
            )
        return loaded
    if split not in loaded:
        near = did_you_mean(str(split), loaded) or "."
        raise ValueError(
            f"split = {split!r}: the dataset has no such split{near} It has {', '.join(loaded)}"
        )
    return loaded[split]


def _defer_decoding(
    rows: "Rows", taken: Sequence[str], mode: Mode | None
) -> tuple["Rows", dict[str, str | None]]:
    """Return the rows with undecoded images, and the mode to convert each image column to."""
    from datasets import Image

    modes: dict[str, str | None] = {
        name: mode or feature.mode
        for name in taken
        if isinstance(feature := rows.features[name], Image)
    }
    if modes:
        import_pillow("huggingface")
    # The library would convert images itself, and clip grey images of 16 bits to 255.
    for name in modes:
        rows = rows.cast_column(name, Image())
    return rows, modes


def _find_class_names(rows: "Rows", target: str | Sequence[str] | None) -> tuple[str, ...]:
    from datasets import ClassLabel

    feature = rows.features[target] if isinstance(target, str) else None
    if isinstance(feature, ClassLabel):
        return tuple(feature.names)
    return ()


def _list_columns(key: str | Sequence[str] | None) -> list[str]:
    if key is None:
        return []
    if isinstance(key, str):
        return [key]
    return list(key)


def _select_columns(row: Mapping[str, Any], key: str | Sequence[str] | None) -> Any:
    if key is None:
        return None
    if isinstance(key, str):
        return row[key]
    return {name: row[name] for name in key}
