"""Masks and boxes of samples."""

import json
from pathlib import Path

import numpy as np
import pytest

from phasetrain.addons.report.images import (
    blend_classes,
    class_color,
    make_data_url,
    resize_nearest,
)
from phasetrain.addons.report.page.overlays import draw_pictures
from phasetrain.addons.report.page.reading import RunReport

IMAGE = make_data_url(np.zeros((2, 2), np.uint8))
MASKS = {
    "index": 3,
    "image": IMAGE,
    "target": IMAGE,
    "prediction": IMAGE,
    "right": 0.975,
    "classes": [0, 2],
}
BOXES = {
    "index": 4,
    "image": IMAGE,
    "size": [16, 12],
    "target": [{"class": 1, "box": [1, 2, 5, 8]}],
    "prediction": [{"class": 9, "box": [1, 2, 6, 8], "score": 0.6}],
}


def draw(folder: Path, **content: object) -> str:
    given = {"test": {"updates": 5, "classes": ["sky", "cat <b>", "dog"], **content}}
    (folder / "predictions.json").write_text(json.dumps(given))
    return draw_pictures(RunReport(folder).predictions["test"])


def test_masks_stand_next_to_their_image(tmp_path: Path) -> None:
    text = draw(tmp_path, masks=[MASKS, MASKS | {"right": None}])
    assert text.count(f'src="{IMAGE}"') == 6
    assert text.count("97.5 %") == 1
    assert [name in text for name in ("sky", "cat", "dog")] == [True, False, True]


@pytest.mark.feature("report.masks")
def test_boxes_are_drawn_over_the_image_in_the_colors_of_the_legend(tmp_path: Path) -> None:
    text = draw(tmp_path, boxes=[BOXES])
    assert text.count('viewBox="0 0 16 12"') == 2
    assert '<rect x="1" y="2" width="4" height="6" style="--c:rgb(230,159,0)"' in text
    assert "<title>class 9 60 %</title>" in text
    assert "cat &lt;b&gt;" in text
    assert text.count("--c:rgb(230,159,0)") == 2
    assert 'viewBox="0 0 6 8"' in draw(tmp_path, boxes=[BOXES | {"image": None, "size": None}])


def test_address_of_a_damaged_file_is_not_loaded(tmp_path: Path) -> None:
    address = "https://example.org/x.png"
    damaged = {"masks": [MASKS | {"target": address}], "boxes": [BOXES | {"image": address}]}
    text = draw(tmp_path, **damaged)
    assert "example.org" not in text
    assert "no image" in text


@pytest.mark.parametrize(
    "damage", [{"masks": [{}]}, {"boxes": [BOXES | {"target": [{"class": 1, "box": [1, "x"]}]}]}]
)
def test_damaged_sample_raises_what_the_section_expects(tmp_path: Path, damage: object) -> None:
    assert isinstance(damage, dict)
    with pytest.raises((KeyError, ValueError)):
        draw(tmp_path, **damage)


def test_nothing_is_drawn_without_samples(tmp_path: Path) -> None:
    assert draw(tmp_path) == ""


def test_pixels_that_do_not_count_are_black_and_others_have_the_color_of_their_class() -> None:
    pixels = np.full((1, 3), 100, np.uint8)
    found = blend_classes(pixels, np.array([[-1, 0, 1]]))
    assert found.tolist() == [[[0, 0, 0], [40, 108, 147], [178, 135, 40]]]
    assert len({class_color(number) for number in range(60)}) == 60


def test_masks_are_subsampled_without_new_classes() -> None:
    assert resize_nearest(np.arange(16).reshape(4, 4), (2, 2)).tolist() == [[0, 2], [8, 10]]
