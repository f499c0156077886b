"""Data that comes in windows, such as hours or folders: each pass of a training goes over one of
them."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from glob import glob
from hashlib import sha256
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.protocols import Described, Samples


class Windows(Dataset[Any]):
    """Data sets one after the other, each of which is a window.

    Args:
        windows: in their order.

    Attributes:
        window_lengths: samples of each window; 0 for an empty one, which a run skips.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, windows: Sequence[Samples]) -> None:
        if not windows:
            raise ValueError("no window")
        self.windows = tuple(windows)
        self.window_lengths = tuple(len(window) for window in windows)
        self._ends = list(accumulate(self.window_lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = bisect_right(self._ends, index)
        return self.windows[number][index - self._ends[number] + self.window_lengths[number]]

    def facts(self) -> Mapping[str, Any]:
        """Return the facts of the first window that has samples; all are taken to share them."""
        filled = [window for window in self.windows if len(window)]
        if filled and isinstance(filled[0], Described):
            return filled[0].facts()
        return {}

    def fingerprint(self) -> str:
        """Return the number of windows, and the SHA-256 over length and fingerprint of each, in
        order."""
        return self._of(len(self.windows))

    def continues(self, fingerprint: str) -> bool:
        """Tell whether the first windows are those that had this fingerprint; there may be more by
        now."""
        count = fingerprint.partition(":")[0]
        return (
            count.isdigit()
            and int(count) <= len(self.windows)
            and self._of(int(count)) == fingerprint
        )

    def _of(self, count: int) -> str:
        digest = sha256()
        for window in self.windows[:count]:
            content = window.fingerprint() if isinstance(window, Described) else ""
            digest.update(f"{len(window)} {content};".encode())
        return f"{count}:{digest.hexdigest()}"


@DATASETS.register("windows")
def windows(pattern: str, of: Mapping[str, Any], parameter: str = "path") -> Windows:
    """Return the data sets of all paths that fit a pattern, in the order of their names.

    Args:
        pattern: of folders or files, such as `clicks/2026-*`, as a shell has it.
        of: data set that reads one of them: `dataset` and its parameters.
        parameter: which of its parameters takes the path; `files` for `lines`.

    Raises:
        ValueError: nothing fits the pattern, or `of` names no data set.
    """
    found = sorted(glob(pattern))  # noqa: PTH207 - a pattern may be absolute
    if not found:
        raise ValueError(
            f"pattern = {pattern!r}: nothing fits it; expected folders or files, one for each window"
        )
    if "dataset" not in of:
        raise ValueError(f"of = {dict(of)}: expected a mapping with `dataset` and its parameters")
    params = {key: value for key, value in of.items() if key != "dataset"}
    where = "DATA.*.of"
    return Windows(
        [DATASETS.build(of["dataset"], {**params, parameter: path}, where=where) for path in found]
    )
