"""Handwritten digits of 8 x 8 pixels, shipped with the package."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from phasetrain.data.datasets.base import DATASETS, TensorSamples
from phasetrain.data.datasets.idx import read_idx
from phasetrain.errors import did_you_mean

SPLITS = ("train", "test", "all")
CLASSES = 10
TEST_EVERY = 5  # every fifth sample of each class, in file order, is a test sample
LARGEST = 16  # a pixel counts the dark dots in a 4 x 4 block of the scan: 0..16


@DATASETS.register("digits")
def load_digits(
    split: Literal["train", "test", "all"] = "train",
    groupings: Mapping[str, Sequence[int]] | None = None,
) -> TensorSamples:
    """Load 1,797 handwritten digits: 1,442 for training and 355 for testing, a fixed split.

    Inputs are float32 `(1, 8, 8)` in [0, 1], targets int64 0..9. The split needs no random numbers:
    every fifth sample of each class, in file order, is a test sample.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
    Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0; see `digits.LICENSE.txt`.

    Args:
        split: `train`, `test` or `all`.
        groupings: name -> group of each digit, such as `{odd: [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]}`, a
            further target next to `label`.

    Raises:
        ValueError: an unknown split, or a grouping that does not have ten groups.
    """
    if split not in SPLITS:
        raise ValueError(
            f"split = {split!r}: expected train, test or all{did_you_mean(split, SPLITS)}"
        )
    images = _read_resource("images")
    labels = _read_resource("labels")
    if split != "all":
        chosen = _is_test(labels) == (split == "test")
        images = images[chosen]
        labels = labels[chosen]
    inputs = images[:, None].astype(np.float32) / LARGEST
    return TensorSamples(
        torch.from_numpy(inputs),
        torch.from_numpy(labels.astype(np.int64)),
        classes=CLASSES,
        groupings=groupings,
    )


def _read_resource(kind: str) -> NDArray[np.uint8]:
    name = f"digits-{kind}.idx.gz"
    return read_idx(files("phasetrain.data.datasets").joinpath(name).read_bytes(), name)


def _is_test(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    chosen = np.zeros(len(labels), dtype=bool)
    for label in range(CLASSES):
        chosen[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return chosen
