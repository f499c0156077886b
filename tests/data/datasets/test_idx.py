import gzip
import struct

import numpy as np
import pytest

from phasetrain.data.datasets import DATASETS, load_idx, read_idx
from phasetrain.errors import ConfigError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def encoded(values, kind="u1"):
    array = np.asarray(values, dtype=f">{kind}")
    return (
        bytes([0, 0, CODES[kind], array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@pytest.fixture
def written(tmp_path):
    def write(images=None, labels=None, *, pack=bytes):
        images = encoded(np.arange(12).reshape(3, 2, 2)) if images is None else images
        labels = encoded([0, 2, 1]) if labels is None else labels
        (tmp_path / "images").write_bytes(pack(images))
        (tmp_path / "labels").write_bytes(pack(labels))
        return {"images": str(tmp_path / "images"), "labels": str(tmp_path / "labels")}

    return write


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_grey_images(written, pack):
    data = load_idx(**written(pack=pack))
    assert data.inputs.shape == (3, 1, 2, 2)
    assert (data.inputs[1, 0] * 255).round().tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert data.targets.tolist() == [0, 2, 1]
    assert data.facts()["classes"] == 3


def test_bytes_reach_one(written):
    data = load_idx(**written(images=encoded(np.full((3, 1, 1), 255))))
    assert data.inputs.unique().tolist() == [1.0]


def test_colours_come_first(written):
    data = load_idx(**written(images=encoded([[[[10, 20, 30]]]] * 3)))
    assert data.inputs.shape == (3, 3, 1, 1)
    assert (data.inputs[0, :, 0, 0] * 255).round().tolist() == [10.0, 20.0, 30.0]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("u1", [0, 255]),
        ("i1", [-128, 127]),
        ("i2", [-2, 258]),
        ("i4", [-2, 16909060]),
        ("f4", [-1.5, 0.25]),
        ("f8", [-1.5, 1e300]),
    ],
)
def test_every_type_is_read_in_big_endian(kind, values):
    assert read_idx(encoded(values, kind), "x").tolist() == values


def test_values_other_than_bytes_are_not_scaled(written):
    data = load_idx(
        **written(images=encoded(np.full((3, 1, 1), -1.5), "f4"), labels=encoded([0, 1, 300], "i2"))
    )
    assert data.inputs.unique().tolist() == [-1.5]
    assert data.targets.tolist() == [0, 1, 300]


def test_classes_given_are_kept(written):
    assert load_idx(**written(), classes=10).facts()["classes"] == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"images": b"\x89PNG and more"},
            "images' is not an IDX file: it starts with the bytes 89 50 4e 47",
        ),
        ({"images": b""}, r"is not an IDX file: it starts with the bytes \(none\)"),
        (
            {"images": encoded(np.zeros((3, 2, 2)))[:-5]},
            "is truncated: .* takes 28 bytes, found 23",
        ),
        (
            {"images": encoded(np.zeros((3, 2, 2)))[:9]},
            "is truncated: its header takes 16 bytes, the file has 9",
        ),
        (
            {"images": encoded(np.zeros((3, 2, 2))) + b"x"},
            "is longer than its header says: .* 28 bytes, found 29",
        ),
        ({"images": gzip.compress(bytes(999))[:-9]}, "is a damaged gzip file"),
        (
            {"images": encoded(np.zeros((2, 2, 2)))},
            "2 images in .*images', but 3 labels in .*labels'",
        ),
        (
            {"images": encoded([0, 1, 2])},
            r"expected \(N, H, W\) or \(N, H, W, C\), found shape \(3,\)",
        ),
        ({"labels": encoded(np.zeros((3, 2, 2)))}, "are images and labels swapped"),
        (
            {"labels": encoded([0, 1, -1], "i1")},
            r"label -1 of sample 2 in .*labels' is outside 0..1",
        ),
        ({"images": encoded(np.zeros((0, 2, 2))), "labels": encoded([])}, "images = .* no samples"),
    ],
)
def test_a_bad_file_is_named(written, change, message):
    with pytest.raises(ValueError, match=message):
        load_idx(**written(**change))


def test_a_label_beyond_the_classes_is_named(written):
    with pytest.raises(
        ValueError, match=r"label 2 of sample 1 in .*labels' is outside 0..1 \(1 such labels\)"
    ):
        load_idx(**written(), classes=2)


def test_a_missing_file_is_named_with_its_key(written):
    paths = written() | {"labels": "/nowhere/labels"}
    with pytest.raises(
        ConfigError,
        match=r"set 'idx'\): labels = '/nowhere/labels':",
    ):
        DATASETS.build("idx", paths, where="DATA.TRAIN")
