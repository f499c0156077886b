"""Samples that a training leaves out of its updates (`DATA.TRAIN.exclude`)."""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phasetrain.data.samplers.permutation import Indices
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import join_first

HEADER = "# dataset: "
"""Begin of the line of a file of ids that names the fingerprint of their dataset."""

MAX_LISTED = 5  # maximum number of ids in an error

Given = str | Sequence[int | str]
"""A file of ids, or a list of ids and of such files."""


class ExcludedSamples:
    """Samples of a dataset that have no part in the updates.

    Args:
        ids: indices in the dataset, int64, ascending, each once.
    """

    def __init__(self, ids: Indices) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def find_kept(self, indices: Indices) -> Indices:
        """Return the positions of the samples that are not excluded, int64, ascending."""
        places = np.searchsorted(self.ids, indices)
        # A binary search instead of np.isin: this runs for each batch, and the ids are sorted once.
        nearest = self.ids[np.minimum(places, len(self.ids) - 1)]
        return np.flatnonzero(nearest != indices)

    def digest(self) -> str:
        """Return the SHA-256 of the ids, whatever their order was."""
        # "<" on every machine: digests are compared across machines.
        return sha256(self.ids.astype("<i8").tobytes()).hexdigest()


class _IdFile(NamedTuple):
    ids: list[Any]
    fingerprint: str


def read_excluded(given: Given, where: str, total: int, fingerprint: str) -> ExcludedSamples:
    """Return the samples that a list or files of ids name.

    A file is `.npy`, or text with an id per line, in which `#` begins a comment. A first line
    `# dataset: FINGERPRINT` ties it to a dataset.

    Args:
        given: the value of the config key.
        where: the config key, for messages.
        total: number of samples of the dataset.
        fingerprint: fingerprint of the dataset.

    Raises:
        ConfigError: an id is not a number, out of range or given twice, none of the samples is
            left, a file cannot be read, or it belongs to another dataset.
    """
    ids = [
        sample_id
        for entry in _list_entries(given)
        for sample_id in _read_entry(entry, where, fingerprint)
    ]
    wrong = [
        sample_id
        for sample_id in ids
        if isinstance(sample_id, bool) or not isinstance(sample_id, int | np.integer)
    ]
    if wrong:
        raise ConfigError(
            f"{where} = {wrong[0]!r}: expected the ids of samples, which are integers from 0, or "
            "files of them",
            code="data.invalid_id",
        )
    outside = [sample_id for sample_id in ids if not 0 <= sample_id < total]
    if outside:
        raise ConfigError(
            f"{where} = {join_first(outside, MAX_LISTED)}: the dataset has {total} samples; "
            f"expected ids from 0 to {total - 1}",
            code="data.unknown_id",
        )
    unique, counts = np.unique(np.array(ids, dtype=np.int64), return_counts=True)
    if len(unique) < len(ids):
        twice = unique[counts > 1].tolist()
        raise ConfigError(
            f"{where}: {join_first(twice, MAX_LISTED)} is given more than once; give each id once",
            code="data.duplicate_id",
        )
    if len(unique) == total:
        raise ConfigError(
            f"{where}: all {total} samples are excluded; leave some to learn from",
            code="data.nothing_left",
        )
    return ExcludedSamples(unique)


def _list_entries(given: Given) -> Iterator[Any]:
    if isinstance(given, str):
        yield given
    else:
        yield from given


def _read_entry(entry: Any, where: str, fingerprint: str) -> list[Any]:
    """Return the ids of an entry of the list: of a file, or a single one."""
    if not isinstance(entry, str):
        return [entry]
    try:
        listed = _read_ids(Path(entry))
    except (OSError, ValueError, EOFError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            f"{where} = {entry!r}: it is neither the id of a sample nor a file that can be read as "
            f"ids of samples: {reason}; expected integers, or the path of an .npy array of "
            "integers, or of a text file with a number per line",
            code="data.unreadable_ids",
        ) from error
    if listed.fingerprint and listed.fingerprint != fingerprint:
        raise ConfigError(
            f"{where} = {entry!r}: its ids belong to the dataset {listed.fingerprint}, and this "
            f"one is {fingerprint}; use ids of this dataset, or remove the first line of the file",
            code="data.other_dataset",
        )
    return listed.ids


def _read_ids(path: Path) -> _IdFile:
    if path.suffix == ".npy":
        # Without pickle, because a pickled array could execute code.
        array = np.load(path, allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"its array is {array.dtype} {array.shape}, expected integers (N,)")
        return _IdFile(array.tolist(), "")
    fingerprint = ""
    ids = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(HEADER):
            fingerprint = line.removeprefix(HEADER).strip()
        text = line.partition("#")[0].strip()
        if not text:
            continue
        # int() alone would also take "1_000" and digits of other scripts.
        if not (text.isascii() and text.removeprefix("-").isdigit()):
            raise ValueError(f"line {number} is {text!r}")
        ids.append(int(text))
    return _IdFile(ids, fingerprint)
