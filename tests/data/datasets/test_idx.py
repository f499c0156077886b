import gzip
import struct

import numpy as np
import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from raising import raises

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
def test_gray_images_are_read(written, pack):
    data = load_idx(**written(pack=pack))
    assert data.inputs.shape == (3, 1, 2, 2)
    assert (data.inputs[1, 0] * 255).round().tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert data.targets.tolist() == [0, 2, 1]
    assert data.facts()["classes"] == 3


def test_names_of_classes_give_their_number(written) -> None:
    facts = load_idx(**written(), class_names=["a", "b", "c", "d"]).facts()
    assert (facts["classes"], facts["class_names"]) == (4, ("a", "b", "c", "d"))


def test_bytes_are_scaled_to_0_to_1(written):
    data = load_idx(**written(images=encoded(np.full((3, 1, 1), 255))))
    assert data.inputs.unique().tolist() == [1.0]


def test_color_channels_come_first(written):
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
def test_every_type_is_read_as_big_endian(kind, values):
    assert read_idx(encoded(values, kind), "x").tolist() == values


def test_values_other_than_bytes_are_not_scaled(written):
    data = load_idx(
        **written(images=encoded(np.full((3, 1, 1), -1.5), "f4"), labels=encoded([0, 1, 300], "i2"))
    )
    assert data.inputs.unique().tolist() == [-1.5]
    assert data.targets.tolist() == [0, 1, 300]


def test_number_of_classes_can_be_given(written):
    assert load_idx(**written(), classes=10).facts()["classes"] == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"images": b"\x89PNG and more"},
            "images' .* 89 50 4e 47",
        ),
        ({"images": b""}, r"images' .*\(none\)"),
        (
            {"images": encoded(np.zeros((3, 2, 2)))[:-5]},
            r"images' .*\b28\b.*\b23$",
        ),
        (
            {"images": encoded(np.zeros((3, 2, 2)))[:9]},
            r"images' .*\b16\b.*\b9$",
        ),
        (
            {"images": encoded(np.zeros((3, 2, 2))) + b"x"},
            r"images' .*\b28\b.*\b29$",
        ),
        ({"images": gzip.compress(bytes(999))[:-9]}, "images' .*gzip"),
        (
            {"images": encoded(np.zeros((2, 2, 2)))},
            "2 images .*images'.* 3 labels .*labels'",
        ),
        (
            {"images": encoded([0, 1, 2])},
            r"images = .*\(N, H, W\).*\(N, H, W, C\).*\(3,\)",
        ),
        ({"labels": encoded(np.zeros((3, 2, 2)))}, r"labels = .*\(3, 2, 2\)"),
        (
            {"labels": encoded([0, 1, -1], "i1")},
            r"label -1 .*sample 2 .*labels' .*0\.\.1",
        ),
        ({"images": encoded(np.zeros((0, 2, 2))), "labels": encoded([])}, "images = "),
    ],
)
def test_bad_files_are_rejected(written, change, message):
    with pytest.raises(ValueError, match=message):
        load_idx(**written(**change))


def test_label_beyond_the_classes_is_rejected(written):
    with pytest.raises(ValueError, match=r"label 2 .*sample 1 .*labels' .*0\.\.1 \(1 "):
        load_idx(**written(), classes=2)


def test_missing_file_is_rejected(written):
    paths = written() | {"labels": "/nowhere/labels"}
    with raises(ConfigError, key="DATA.TRAIN") as caught:
        DATASETS.build("idx", paths, where="DATA.TRAIN")
    assert "labels = '/nowhere/labels':" in str(caught.value)


class TestGroupings:
    def test_targets_have_a_group_for_each_class(self, written) -> None:
        data = load_idx(**written(), groupings={"kind": [1, 0, 1]})
        assert data[1][1] == {"label": 2, "kind": 1}
        inputs, targets = data.__getitems__(torch.tensor([0, 2]))
        assert inputs.shape == (2, 1, 2, 2)
        assert {name: one.tolist() for name, one in targets.items()} == {
            "label": [0, 1],
            "kind": [1, 0],
        }
        assert data.labels().tolist() == [0, 2, 1]

    def test_groupings_are_part_of_the_fingerprint(self, written) -> None:
        files = written()
        prints = {
            load_idx(**files, groupings={"kind": groups}).fingerprint()
            for groups in ([0, 0, 1], [0, 1, 1])
        }
        assert len(prints | {load_idx(**files).fingerprint()}) == 3

    @pytest.mark.parametrize(
        "groupings", [{"kind": [0, 1]}, {"label": [0, 1, 1]}, {"kind": [0, -1, 1]}]
    )
    def test_wrong_groupings_are_rejected(self, written, groupings) -> None:
        with pytest.raises(ValueError, match="groupings"):
            load_idx(**written(), groupings=groupings)

    @pytest.mark.addon("vision")
    @pytest.mark.feature(
        "data.groupings",
        "several targets from one label, for models with several heads",
        "`DATA.*.groupings` of `idx`, recipe [multitask](recipes/multitask.md)",
    )
    def test_killed_run_with_two_heads_resumes_bit_identically(self, tmp_path) -> None:
        pictures = np.random.default_rng(0).integers(0, 255, (96, 8, 8))
        (tmp_path / "images").write_bytes(encoded(pictures))
        (tmp_path / "labels").write_bytes(encoded(np.arange(96) % 3))
        words = ["PHASES.epochs=1", "~MODEL.width", "~MODEL.dropout"]
        words += ["METERS.accuracy={output: class, target: label}"]
        for split in ("TRAIN", "TEST"):
            words += [f"DATA.{split}.dataset=idx", f"DATA.{split}.images={tmp_path}/images"]
            words += [f"DATA.{split}.labels={tmp_path}/labels"]
            words += [f"DATA.{split}.groupings={{kind: [0, 1, 1]}}"]
        words += [
            "MODEL={name: trunk_heads, trunk: {name: small_cnn, width: 4, cut: head}}",
            "MODEL.heads={class: {name: mlp}, kind: {name: mlp, classes: 2}}",
            "LOSS={name: weighted_sum}",
            "LOSS.losses.class={name: cross_entropy, output: class, target: label}",
            "LOSS.losses.kind={name: cross_entropy, output: kind, target: kind, weight: 0.3}",
        ]
        train(tmp_path / "whole", *words)
        run_until_killed(
            tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(2)}
        )
        train(tmp_path / "killed", *words)
        assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []
