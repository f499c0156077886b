import torch
from raising import raises

from phasetrain.data.datasets import DATASETS, load_digits
from phasetrain.errors import ConfigError


def test_first_train_sample_is_this_zero():
    image, label = load_digits("train")[0]
    assert label.item() == 0
    assert image.dtype == torch.float32
    assert (image[0] * 16).int().tolist() == [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0],
    ]


def test_splits_have_these_fingerprints():
    assert (
        load_digits("all").fingerprint()
        == "8d57c67bd91161d0fb38ad1d14ed2824c43c99bd7cb91159c2ecaf1b643c1bc6"
    )
    assert (
        load_digits("train").fingerprint()
        == "0aa51e973b13ecdfac424e924494fd069e30d84c45621e68495de1856c83adb3"
    )
    assert (
        load_digits("test").fingerprint()
        == "62608db38931fe22fccf7d6ac06d00d449fc117c9224550f3c347c98ad4c082f"
    )


def test_splits_are_stratified_and_cover_all_images():
    train, test, whole = load_digits("train"), load_digits("test"), load_digits("all")
    assert train.targets.bincount().tolist() == [143, 146, 142, 147, 145, 146, 145, 144, 140, 144]
    assert test.targets.bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert (len(train), len(test), len(whole)) == (1442, 355, 1797)
    parts = torch.cat([train.inputs, test.inputs]).flatten(1).sort(0).values
    assert torch.equal(parts, whole.inputs.flatten(1).sort(0).values)


def test_no_image_is_in_both_splits():
    rows = [
        {tuple(row) for row in load_digits(split).inputs.flatten(1).tolist()}
        for split in ("train", "test")
    ]
    assert len(rows[0] & rows[1]) == 0


def test_facts_and_range_of_values():
    data = DATASETS.build("digits", where="DATA.TRAIN")
    assert data.facts()["classes"] == 10
    assert data.facts()["input_shape"] == (1, 8, 8)
    assert data.facts()["channels"] == 1
    assert (data.inputs.min().item(), data.inputs.max().item()) == (0.0, 1.0)


def test_unknown_split_is_rejected():
    with raises(ConfigError, key="DATA.TEST", suggestion="test"):
        DATASETS.build("digits", {"split": "tset"}, where="DATA.TEST")
