"""Datasets of torch with other samples have other fingerprints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from phasetrain.data.fingerprints import hash_dataset


class Plain(Dataset[int]):
    """A dataset of which nothing is known but class and length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Printed(Plain):
    """A dataset with a fingerprint."""

    def fingerprint(self) -> str:
        return f"printed {self.length}"


NUMBERS = TensorDataset(torch.arange(4))
OTHER = TensorDataset(torch.arange(4) + 1)


@pytest.mark.feature(
    "fingerprint.torch",
    "a resume notices other indices of a `Subset`, also of `random_split`, and other parts of a "
    "`ConcatDataset`",
    "`phasetrain.fit`, `DATA.*.dataset`",
)
@pytest.mark.parametrize(
    ("dataset", "other", "is_equal"),
    [
        (Subset(Plain(9), [0, 1]), Subset(Plain(9), [0, 2]), False),
        (Subset(Plain(9), [0, 1]), Subset(Plain(9), [1, 0]), False),
        (Subset(Plain(9), [0, 1]), Subset(Plain(8), [0, 1]), False),
        (Subset(Plain(9), [0, 1]), Subset(Printed(9), [0, 1]), False),
        (Subset(NUMBERS, [0, 1]), Subset(OTHER, [0, 1]), False),
        (Subset(Subset(Plain(9), [0, 1]), [0]), Subset(Subset(Plain(9), [0, 2]), [0]), False),
        (Subset(Plain(9), ["a", "b"]), Subset(Plain(9), ["a", "c"]), False),
        (ConcatDataset([NUMBERS, OTHER]), ConcatDataset([OTHER, NUMBERS]), False),
        (ConcatDataset([Plain(1), Plain(2)]), ConcatDataset([Plain(2), Plain(1)]), False),
        (NUMBERS, OTHER, False),
        (Subset(Plain(9), [0, 1]), Subset(Plain(9), range(2)), True),
        (Subset(Plain(9), [0, 1]), Subset(Plain(9), torch.arange(2)), True),
        (ConcatDataset([NUMBERS, Printed(2)]), ConcatDataset([NUMBERS, Printed(2)]), True),
    ],
)
def test_fingerprint_differs_if_samples_may_differ(
    dataset: Dataset[int], other: Dataset[int], *, is_equal: bool
) -> None:
    assert hash_dataset(dataset) is not None
    assert (hash_dataset(dataset) == hash_dataset(other)) == is_equal


def test_random_split_of_another_seed_has_another_fingerprint() -> None:
    made = [
        random_split(Plain(9), [6, 3], torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)
    ]
    first, same, other = map(hash_dataset, made)
    assert first == same != other


class Mapped(Plain):
    """A dataset with a memory map, directly and in a list."""

    def __init__(self, path: Path) -> None:
        super().__init__(4)
        self.arrays = [np.load(path, mmap_mode="r")]
        self.first = self.arrays[0]


@pytest.mark.feature("fingerprint.torch")
@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_changed_file_behind_a_memory_map_is_noticed(size: int, tmp_path: Path) -> None:
    path, copy = tmp_path / "values.npy", tmp_path / "elsewhere" / "values.npy"
    np.save(path, np.arange(size))
    before = hash_dataset(Mapped(path))
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())  # with another modification time
    assert hash_dataset(Mapped(copy)) == before
    np.save(path, np.arange(size)[::-1].copy())
    after = hash_dataset(Mapped(path))
    assert None not in (before, after)
    assert after != before


def test_mapped_file_that_is_gone_has_no_fingerprint(tmp_path: Path) -> None:
    np.save(tmp_path / "values.npy", np.arange(4))
    dataset = Mapped(tmp_path / "values.npy")
    (tmp_path / "values.npy").unlink()
    assert hash_dataset(dataset) is None


def test_dataset_of_which_nothing_is_known_has_none() -> None:
    assert hash_dataset(Plain(3)) is None
