"""Data in windows, such as hours or folders; each epoch of a training covers one of them."""

from collections.abc import Mapping, Sequence
from glob import glob
from hashlib import sha256
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from phasetrain.data.datasets.base import DATASETS, locate_part
from phasetrain.data.protocols import Fingerprinted, Samples, read_facts


class Windows(Dataset[Any]):
    """Windows, one after the other.

    Args:
        windows: the datasets in order.

    Attributes:
        window_lengths: number of samples of each window; empty windows are skipped.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, windows: Sequence[Samples]) -> None:
        if not windows:
            raise ValueError("windows = []: expected at least one")
        self.windows = tuple(windows)
        self.window_lengths = tuple(len(window) for window in windows)
        self._begins = np.cumsum([0, *self.window_lengths])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, index: int) -> Any:
        number, within = locate_part(self._begins, index)
        return self.windows[number][within]

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the first nonempty window; all are assumed to share them."""
        return read_facts(next((window for window in self.windows if len(window)), None))

    def fingerprint(self) -> str:
        """Return the number of windows, and the SHA-256 over length and fingerprint of each, in
        order."""
        # The number is part of the fingerprint, so that a run that has got more windows since can
        # be compared with the first ones alone.
        return self._digest_first(len(self.windows))

    def continues(self, fingerprint: str) -> bool:
        """Return whether the first windows had this fingerprint; there may be more by now."""
        count = fingerprint.partition(":")[0]
        return (
            count.isdigit()
            and int(count) <= len(self.windows)
            and self._digest_first(int(count)) == fingerprint
        )

    def _digest_first(self, count: int) -> str:
        digest = sha256()
        for window in self.windows[:count]:
            content = window.fingerprint() if isinstance(window, Fingerprinted) else ""
            digest.update(f"{len(window)} {content};".encode())
        return f"{count}:{digest.hexdigest()}"


@DATASETS.register("windows")
def make_windows(pattern: str, of: Mapping[str, Any], parameter: str = "path") -> Windows:
    """Return the datasets of all paths that match a pattern, in the order of their names.

    Args:
        pattern: glob pattern of folders or files, such as `clicks/2026-*`.
        of: dataset that reads one of them: `dataset` and its parameters.
        parameter: the parameter of that dataset for the path; `files` for `lines`.

    Raises:
        ValueError: nothing matches, or `of` has no dataset.
    """
    paths = sorted(glob(pattern))  # noqa: PTH207 - a pattern may be absolute
    if not paths:
        raise ValueError(
            f"pattern = {pattern!r}: nothing matches; expected a folder or file for each window"
        )
    if "dataset" not in of:
        raise ValueError(f"of = {dict(of)}: expected a mapping with `dataset` and its parameters")
    params = {key: value for key, value in of.items() if key != "dataset"}
    where = "DATA.*.of"
    return Windows(
        [DATASETS.build(of["dataset"], {**params, parameter: path}, where=where) for path in paths]
    )
