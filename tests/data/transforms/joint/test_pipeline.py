"""Image, mask, boxes and key points of a sample stay consistent, because they see one draw."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from segment_parts import WORDS
from torch import Tensor

from phasetrain.data.bad_samples import SampleError
from phasetrain.data.loading.collate import make_list
from phasetrain.data.loading.fields import FieldSelection
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.loading.seed_check import check_seeded, is_identical
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.data.transforms import (
    TRANSFORMS,
    BatchTransform,
    FieldPipeline,
    GeometricTransform,
    JointTransform,
    Keys,
    Pipeline,
    Placement,
    parse_field_kinds,
)
from phasetrain.data.transforms.joint.kinds import FieldFormError
from phasetrain.errors import ConfigError
from phasetrain.testing.build import build_run

HEIGHT, WIDTH = 9, 12
PAIR = parse_field_kinds({"image": "image", "mask": {"kind": "mask", "fill": 0}}, "DATA")
ALL = parse_field_kinds(
    {
        "image": "image",
        "mask": "mask",
        "boxes": "boxes",
        "labels": "labels",
        "points": "keypoints",
    },
    "DATA",
)
GEOMETRIC = {
    "random_flip": {},
    "random_crop": {"size": 7, "padding": 2},
    "center_crop": {"size": 5},
    "random_shift": {"pixels": 3},
    "resize": {"size": 10, "interpolation": "nearest"},
    "random_resized_crop": {"size": 8, "interpolation": "nearest"},
    "random_rotate": {"degrees": 180, "interpolation": "nearest"},
}
OF_VISION = ("random_resized_crop", "random_rotate", "random_erase")
"""Transforms of the add-on vision."""


def as_params(*names: str) -> list[Any]:
    """Return names of transforms that are skipped without the add-on that has them."""
    return [
        pytest.param(name, marks=[pytest.mark.addon("vision")] if name in OF_VISION else [])
        for name in names
    ]


def make_pair() -> dict[str, Tensor]:
    """Return an image whose pixels have the numbers of a mask."""
    mask = torch.arange(1, HEIGHT * WIDTH + 1).reshape(HEIGHT, WIDTH)
    return {"image": mask[None].float(), "mask": mask}


def make_blob(top: int, left: int, tall: int, wide: int, size: int = 40) -> dict[str, Any]:
    """Return a rectangle in an image, as mask, box and key points near two of its corners."""
    mask = torch.zeros(size, size, dtype=torch.int64)
    mask[top : top + tall, left : left + wide] = 1
    corners = [(left + 2.5, top + 2.5, 2), (left + wide - 2.5, top + tall - 2.5, 2)]
    return {
        "image": mask[None].float(),
        "mask": mask,
        "boxes": [[left, top, left + wide, top + tall]],
        "labels": [3],
        "points": corners,
    }


@pytest.mark.feature(
    "fields",
    "image, mask, boxes and key points are transformed together, with one draw per sample",
    "`DATA.*.fields`, [fields.md](fields.md)",
)
@pytest.mark.parametrize("name", as_params(*GEOMETRIC))
def test_image_and_index_image_agree_in_each_pixel_over_1000_draws(name: str) -> None:
    pipeline = FieldPipeline([TRANSFORMS.build(name, GEOMETRIC[name])], PAIR)
    sample = make_pair()
    seen = set()
    for number in range(1000):
        found = pipeline.transform_sample(sample, Keys([number]))
        assert torch.equal(found["image"][0].long(), found["mask"])
        seen.add(found["mask"].numpy().tobytes())
    if name not in ("center_crop", "resize"):
        assert len(seen) > 1


@pytest.mark.feature("fields")
def test_fields_with_different_draws_are_found() -> None:
    pipeline = FieldPipeline([TRANSFORMS.build("random_crop", {"size": 7})], PAIR)
    sample = make_pair()
    image = pipeline.transform_sample(sample, Keys([0]))["image"]
    mask = pipeline.transform_sample(sample, Keys([1]))["mask"]
    assert not torch.equal(image[0].long(), mask)


@pytest.mark.feature("fields")
@pytest.mark.parametrize(
    "name", as_params(*(name for name in GEOMETRIC if name != "random_rotate"))
)
def test_boxes_and_key_points_agree_with_a_drawn_blob(name: str) -> None:
    params = {**GEOMETRIC[name]} | ({"size": 31} if "size" in GEOMETRIC[name] else {})
    pipeline = FieldPipeline([TRANSFORMS.build(name, params)], ALL)
    for number in range(60):
        found = pipeline.transform_sample(make_blob(8, 11, 13, 9), Keys([number]))
        y, x = (found["mask"] == 1).nonzero().unbind(1)
        if not len(x):
            assert found["boxes"].shape == (0, 4) or bool((found["boxes"][:, 2:] > 0).all())
            continue
        if not len(found["boxes"]):
            continue  # a sliver that is thinner than a pixel
        assert found["labels"].tolist() == [3]
        drawn = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])
        assert (found["boxes"][0] - drawn).abs().max() <= 0.5 + 1e-4
        for px, py, visibility in found["points"].tolist():
            if visibility:
                assert found["mask"][int(py), int(px)] == 1


@pytest.mark.addon("vision")
def test_quarter_turns_move_boxes_and_points_exactly() -> None:
    pipeline = FieldPipeline([TRANSFORMS.build("random_rotate", {"degrees": 180, "step": 90})], ALL)
    seen = set()
    for number in range(30):
        found = pipeline.transform_sample(make_blob(8, 11, 13, 9), Keys([number]))
        y, x = (found["mask"] == 1).nonzero().unbind(1)
        box = [int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1]
        assert found["boxes"].tolist() == [box]
        assert [found["mask"][int(py), int(px)] for px, py, _ in found["points"].tolist()] == [1, 1]
        seen.add(tuple(box))
    assert (11, 8, 20, 21) in seen
    assert (20, 19, 29, 32) in seen  # turned by 180 degrees: 40 - 20, 40 - 21, ...


def test_boxes_outside_are_dropped_with_their_labels() -> None:
    kinds = parse_field_kinds(
        {"image": "image", "boxes": {"kind": "boxes", "smallest": 2}, "labels": "labels"}, "DATA"
    )
    pipeline = FieldPipeline([TRANSFORMS.build("center_crop", {"size": 4})], kinds)
    sample = {
        "image": torch.zeros(1, 8, 8),
        "boxes": [[0, 0, 2, 2], [1, 1, 5, 5], [0, 0, 3, 8]],
        "labels": [7, 8, 9],
        "name": "a.png",
    }
    found = pipeline.transform_sample(sample, Keys([0]))
    assert found["boxes"].tolist() == [[0, 0, 3, 3]]
    assert found["labels"].tolist() == [8]
    assert found["name"] == "a.png"


def test_mirrored_key_points_swap_left_and_right() -> None:
    kinds = parse_field_kinds(
        {"image": "image", "eyes": {"kind": "keypoints", "mirror": [1, 0]}}, "DATA"
    )
    pipeline = FieldPipeline([TRANSFORMS.build("random_flip", {"probability": 1.0})], kinds)
    sample = {"image": torch.zeros(1, 4, 10), "eyes": [[2.5, 1.5, 2], [20.0, 1.0, 1]]}
    found = pipeline.transform_sample(sample, Keys([0]))
    assert found["eyes"].tolist() == [[0, 0, 0], [7.5, 1.5, 2]]


@pytest.mark.parametrize("name", as_params(*GEOMETRIC, "noise", "random_erase"))
def test_image_has_the_bits_of_the_image_alone(name: str) -> None:
    transform = TRANSFORMS.build(name, {"noise": {"std": 0.1}, **GEOMETRIC}.get(name, {}))
    image = torch.rand(3, HEIGHT, WIDTH)
    joint = FieldPipeline([transform], PAIR)
    alone = transform(image[None], Keys([5]).fork(0))[0]
    sample = {"image": image, "mask": make_pair()["mask"]}
    assert torch.equal(joint.transform_sample(sample, Keys([5]))["image"], alone)


def test_transforms_within_apply_see_all_fields_or_none() -> None:
    apply = TRANSFORMS.build("apply", {"transforms": [{"name": "random_shift", "pixels": 3}]})
    pipeline = FieldPipeline([apply], PAIR)
    changed = 0
    for number in range(100):
        found = pipeline.transform_sample(make_pair(), Keys([number]))
        assert torch.equal(found["image"][0].long(), found["mask"])
        changed += not torch.equal(found["mask"], make_pair()["mask"])
    assert 30 < changed < 70


@pytest.mark.addon("vision")
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda only: only, "DATA.TRAIN.transforms[1].fields"),
        (
            lambda only: {"name": "apply", "transforms": ["random_flip", only]},
            "DATA.TRAIN.transforms[1].transforms[1].fields",
        ),
        (
            lambda only: {"name": "apply", "transforms": [only]},
            "DATA.TRAIN.transforms[1].transforms[0].fields",
        ),
        (
            lambda only: {"name": "on_fields", "fields": ["image"], "transforms": [only]},
            "DATA.TRAIN.transforms[1].transforms[0].fields",
        ),
    ],
)
def test_fields_that_are_not_declared_are_rejected_before_a_sample_is_read(
    make: Callable[[dict[str, Any]], dict[str, Any]], key: str
) -> None:
    only = {"name": "on_fields", "fields": ["imge"], "transforms": ["random_flip"]}
    transforms = f"DATA.TRAIN.transforms={json.dumps(['random_flip', make(only)])}"
    expected = {"code": "config.missing_field", "given": "'imge'", "suggestion": "image"}
    with raises(ConfigError, key=key, **expected):
        build_run([*WORDS, transforms.replace('"', "")])


def test_on_fields_changes_only_the_named_ones() -> None:
    kinds = parse_field_kinds({"image": "image", "depth": "image"}, "DATA")
    inner = [{"name": "noise", "std": 1.0}]
    only = TRANSFORMS.build("on_fields", {"fields": ["depth"], "transforms": inner})
    sample = {"image": torch.zeros(1, 4, 4), "depth": torch.zeros(1, 4, 4)}
    found = FieldPipeline([only], kinds).transform_sample(sample, Keys([0]))
    assert not found["image"].any()
    assert found["depth"].all()


def test_samples_that_are_tuples_have_fields_by_place() -> None:
    kinds = parse_field_kinds(["image", {"kind": "mask", "fill": 0}], "DATA")
    pipeline = FieldPipeline([TRANSFORMS.build("random_flip", {"probability": 1.0})], kinds)
    pair = make_pair()
    image, mask = pipeline.transform_sample((pair["image"], pair["mask"]), Keys([0]))
    assert torch.equal(image[0].long(), mask)
    assert torch.equal(mask, pair["mask"].flip(1))


def make_two_sizes(width: int = WIDTH, **more: Any) -> dict[str, Any]:
    """Return an image and the same image with twice the size, and a mask of its size."""
    small = torch.arange(1.0, 9 * width + 1).reshape(1, 9, width)
    large = small.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return {"small": small, "large": large, "mask": large[0].long(), **more}


@pytest.mark.feature("fields")
@pytest.mark.parametrize(
    ("name", "params", "width"),
    [
        ("random_flip", {}, WIDTH),
        ("apply", {"transforms": ["random_flip"]}, WIDTH),
        pytest.param(
            *("random_rotate", {"degrees": 180, "step": 90}, 9), marks=pytest.mark.addon("vision")
        ),
        pytest.param(
            *("torchvision.RandomHorizontalFlip", {}, WIDTH), marks=pytest.mark.addon("libraries")
        ),
    ],
)
def test_images_of_two_sizes_move_together(name: str, params: dict[str, Any], width: int) -> None:
    kinds = parse_field_kinds({"small": "image", "large": "image", "mask": "mask"}, "DATA")
    pipeline = FieldPipeline([TRANSFORMS.build(name, params)], kinds)
    moved = 0
    for number in range(20):
        torch.manual_seed(number)
        found = pipeline.transform_sample(make_two_sizes(width), Keys([number]))
        small = found["small"].round()
        expected = small.repeat_interleave(2, 1).repeat_interleave(2, 2)
        assert torch.equal(found["large"].round(), expected)
        assert torch.equal(found["mask"], expected[0].long())
        moved += not torch.equal(small, make_two_sizes(width)["small"])
    assert 0 < moved < 20


@pytest.mark.parametrize(
    ("name", "params", "more"),
    [
        ("random_crop", {"size": 4}, {}),
        ("random_flip", {}, {"boxes": [[0, 0, 2, 2]]}),
    ],
)
def test_images_of_two_sizes_are_rejected_by_transforms_that_need_one(
    name: str, params: dict[str, Any], more: dict[str, Any]
) -> None:
    kinds = parse_field_kinds(
        {"small": "image", "large": "image", **{key: key for key in more}}, "DATA"
    )
    pipeline = FieldPipeline([TRANSFORMS.build(name, params)], kinds)
    with pytest.raises(FieldFormError):
        pipeline.transform_sample(make_two_sizes(**more), Keys([0]))
    samples = [make_two_sizes(**more)] * 4
    selection = FieldSelection("small", "large")
    reader = SampleReader(samples, pipeline, make_list(), seed=3, selection=selection)
    with raises(SampleError, code="data.unreadable_sample") as caught:
        reader[Draw("train", 0, 0, np.array([0, 1]))]
    assert "on_bad_sample" not in str(caught.value)


class Whiten(JointTransform):
    """A transform of a user with one method."""

    def transform_fields(self, values: Any, kinds: Any, key: Keys) -> Any:
        return {name: torch.ones_like(values[name]) for name in kinds}


def test_joint_transform_needs_one_method() -> None:
    kinds = parse_field_kinds({"small": "image", "large": "image"}, "DATA")
    pipeline = FieldPipeline([Whiten()], kinds)
    assert callable(Whiten())
    found = pipeline.transform_sample(make_two_sizes(), Keys([0]))
    assert int(found["large"].sum()) == 4 * 9 * WIDTH
    with pytest.raises(FieldFormError):
        Pipeline([Whiten()]).transform_sample(torch.zeros(1, 4, 4), Keys([0]))


class UpsideDown(GeometricTransform):
    """A transform of a user."""

    def draw_placement(self, size: tuple[int, int], key: Keys) -> Placement:
        if key.uniform()[0] < 0.5:
            return Placement(((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0), size)
        return Placement(((1.0, 0.0), (0.0, -1.0)), (0.0, float(size[0])), size)


def test_placement_of_a_custom_transform_is_enough() -> None:
    pipeline = FieldPipeline([UpsideDown()], PAIR)
    flipped = 0
    for number in range(20):
        found = pipeline.transform_sample(make_pair(), Keys([number]))
        assert torch.allclose(found["image"][0], found["mask"].float(), atol=1e-3)
        flipped += bool(found["mask"][0, 0] != 1)
    assert 0 < flipped < 20


class Shrink(BatchTransform):
    """A transform of images that does not know of fields."""

    def __call__(self, batch: Tensor, keys: Keys) -> Tensor:
        return batch[:, :, ::2, ::2]


def test_transform_that_only_moves_the_image_is_rejected() -> None:
    with pytest.raises(ValueError, match="no longer fits mask"):
        FieldPipeline([Shrink()], PAIR).transform_sample(make_pair(), Keys([0]))


def test_missing_field_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"fields.mask: the sample has no such field"):
        FieldPipeline([], PAIR).transform_sample({"image": torch.zeros(1, 2, 2)}, Keys([0]))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"a": "imgae"}, "config.wrong_value"),
        ({"a": {"kind": "mask", "fil": 0}}, "config.unknown_key"),
        ({"a": "boxes", "b": "boxes"}, "config.conflict"),
    ],
)
def test_wrong_declaration_is_rejected(given: Any, code: str) -> None:
    with raises(ConfigError, code=code):
        parse_field_kinds(given, "DATA.TRAIN.fields")


class Pictures:
    """Samples with all kinds of fields."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_blob(3 + index, 5, 9, 12, size=24)


def read_draws(transforms: list[Any], draws: list[list[int]]) -> dict[int, Any]:
    """Return the samples of draws, read by a new reader."""
    selection = FieldSelection("image", ["mask", "boxes", "labels", "points"])
    pipeline = FieldPipeline(transforms, ALL)
    reader = SampleReader(Pictures(), pipeline, make_list(), seed=3, selection=selection)
    check_seeded(reader, "pictures")
    found = {}
    for draw in draws:
        batch = reader[Draw("train", 0, draw[0], np.array(draw))]
        found |= dict(zip(draw, zip(batch.input, batch.target, strict=True), strict=True))
    return found


def test_transform_of_torchvision_without_the_add_on_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    monkeypatch.setattr("phasetrain.config.addons.load_addons", tuple)
    with raises(ConfigError, code="addon.missing"):
        FieldPipeline([v2.RandomHorizontalFlip()], PAIR).transform_sample(make_pair(), Keys([0]))


TORCHVISION = [
    ("torchvision.RandomHorizontalFlip", {"p": 0.5}),
    ("torchvision.RandomCrop", {"size": 20}),
    ("torchvision.ColorJitter", {"brightness": 0.5}),
]
ALBUMENTATIONS = [
    ("albumentations.HorizontalFlip", {"p": 0.5}),
    ("albumentations.RandomCrop", {"height": 20, "width": 20}),
    ("albumentations.RandomBrightnessContrast", {"p": 1.0}),
]


@pytest.mark.addon("libraries")
@pytest.mark.parametrize("items", [TORCHVISION, ALBUMENTATIONS], ids=["torchvision", "alb"])
class TestBridges:
    @pytest.mark.feature(
        "fields.libraries",
        "fields in transforms of torchvision and Albumentations, the same in every reader",
        "`torchvision.NAME`, `albumentations.NAME`",
    )
    def test_readers_agree_whatever_the_order(self, items: Any) -> None:
        pytest.importorskip(items[0][0].partition(".")[0])
        transforms = [TRANSFORMS.build(*item) for item in items]
        one = read_draws(transforms, [[0, 1, 2], [3, 4, 5]])
        other = read_draws(transforms, [[3, 4, 5], [0, 1, 2]])
        assert all(is_identical(one[index], other[index]) for index in range(6))

    def test_fields_agree(self, items: Any) -> None:
        pytest.importorskip(items[0][0].partition(".")[0])
        transforms = [TRANSFORMS.build(*item) for item in items[:2]]
        for image, target in read_draws(transforms, [[0, 1, 2, 3, 4, 5]]).values():
            mask = target["mask"]
            assert mask.shape == (20, 20)
            assert torch.equal(image[0].long(), mask)
            y, x = (mask == 1).nonzero().unbind(1)
            box = [int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1]
            # Albumentations scales boxes to [0, 1] and back.
            assert torch.allclose(target["boxes"], torch.tensor([box]).float(), atol=1e-4)
            assert target["labels"].tolist() == [3]
            shown = target["points"][target["points"][:, 2] > 0]
            assert all(mask[int(py), int(px)] == 1 for px, py, _ in shown.tolist())


@pytest.mark.feature("fields.libraries")
def test_albumentations_without_our_seeds_is_found() -> None:
    albumentations = pytest.importorskip("albumentations")
    composed = albumentations.Compose([albumentations.RandomBrightnessContrast(p=1.0)])

    def brighten(image: Tensor) -> Tensor:
        array = image.permute(1, 2, 0).numpy()
        return torch.from_numpy(composed(image=array)["image"]).permute(2, 0, 1)

    with raises(ConfigError, code="config.impure_sample"):
        read_draws([brighten], [[0]])
