"""Samples of segmentation and detection: masks or boxes of target and prediction, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from phasetrain.addons.report.images import PREFIX, class_color
from phasetrain.addons.report.page.reading import PredictionsRecord
from phasetrain.runs.records import parse_number
from phasetrain.runtime.format import format_count
from phasetrain.runtime.html import element, escape_text

MAX_NAMED_CLASSES = 24
"""Maximum number of classes that the legend names."""

TITLES = {"masks": "Masks of the test", "boxes": "Boxes of the test"}
NOTES = {
    "masks": "below each sample: right pixels; black: pixels that do not count",
    "boxes": "fainter predictions have lower scores; the pointer shows the score",
}


def draw_pictures(predictions: PredictionsRecord) -> str:
    """Return a figure with the samples that have masks or boxes; empty without any.

    Raises:
        ValueError, KeyError, TypeError: a sample is damaged.
    """
    parts = []
    for picture_kind, draw in (("masks", _draw_masks), ("boxes", _draw_boxes)):
        samples = predictions.pictures.get(picture_kind)
        if not samples:
            continue
        cards = "".join(draw(sample, predictions.classes) for sample in samples)
        head = element("b", TITLES[picture_kind]) + " " + element("span", NOTES[picture_kind])
        legend = _draw_legend(_list_classes(picture_kind, samples), predictions.classes)
        content = element("figcaption", head) + legend + element("div", cards, cls="overlays")
        parts.append(element("figure", content, cls="pictures"))
    return "".join(parts)


def _list_classes(picture_kind: str, samples: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the classes that occur in the samples."""
    if picture_kind == "masks":
        return sorted({int(number) for sample in samples for number in sample["classes"]})
    boxes = [box for sample in samples for key in ("target", "prediction") for box in sample[key]]
    return sorted({int(box["class"]) for box in boxes})


def _draw_legend(classes: Sequence[int], names: Sequence[str]) -> str:
    keys = [
        element("span", escape_text(_name_class(number, names)), cls="key", style=_style(number))
        for number in classes[:MAX_NAMED_CLASSES]
    ]
    if len(classes) > MAX_NAMED_CLASSES:
        keys.append(f"and {len(classes) - MAX_NAMED_CLASSES} more")
    return element("p", "".join(keys), cls="note")


def _draw_masks(sample: Mapping[str, Any], names: Sequence[str]) -> str:
    hint = f"sample {sample.get('index', '?')}"
    pictures = [
        _draw_cell(_draw_image(str(sample.get(key) or ""), f"{hint}, {key}"), key)
        for key in ("image", "target", "prediction")
    ]
    share = parse_number(sample.get("right"))
    text = ""
    if share == share:  # not NaN, as it is without pixels that count
        text = f"{100 * share:.1f} %"
    return _draw_card("".join(pictures), text, hint)


def _draw_boxes(sample: Mapping[str, Any], names: Sequence[str]) -> str:
    hint = f"sample {sample.get('index', '?')}"
    pictures = []
    for key in ("target", "prediction"):
        boxes = [[*map(float, box["box"])] for box in sample[key]]
        # Without an image, the frame is as large as the boxes.
        reach = [max([1.0, *(box[side] for box in boxes)]) for side in (2, 3)]
        width, height = [float(side) for side in sample.get("size") or reach]
        drawn = [
            _draw_box(box, corners, names) for box, corners in zip(sample[key], boxes, strict=True)
        ]
        image = str(sample.get("image") or "")
        if image.startswith(PREFIX):
            drawn.insert(0, element("image", href=image, width=f"{width:g}", height=f"{height:g}"))
        view = f"0 0 {width:g} {height:g}"
        pictures.append(_draw_cell(element("svg", "".join(drawn), viewBox=view, role="img"), key))
    return _draw_card("".join(pictures), format_count(len(sample["target"]), "box"), hint)


def _draw_box(box: Mapping[str, Any], corners: Sequence[float], names: Sequence[str]) -> str:
    left, top, right, bottom = corners
    title = _name_class(int(box["class"]), names)
    score = parse_number(box.get("score"))
    shown = "1"
    if score == score:  # not NaN: a prediction
        title += f" {100 * score:.0f} %"
        shown = f"{min(max(score, 0.15), 1):.2f}"
    return element(
        "rect",
        element("title", escape_text(title)),
        x=f"{left:g}",
        y=f"{top:g}",
        width=f"{max(right - left, 0):g}",
        height=f"{max(bottom - top, 0):g}",
        style=_style(int(box["class"])),
        stroke_opacity=shown,
    )


def _draw_card(pictures: str, text: str, hint: str) -> str:
    content = element("div", pictures, cls="row") + element("span", escape_text(text))
    return element("div", content, cls="overlay", title=hint)


def _draw_cell(picture: str, name: str) -> str:
    return element("span", picture + escape_text(name))


def _draw_image(image: str, hint: str) -> str:
    # only data URLs: an address in a damaged file must not be loaded
    if not image.startswith(PREFIX):
        return element("span", "no image", cls="none")
    return f'<img src="{escape_text(image)}" alt="{escape_text(hint)}">'


def _name_class(number: int, names: Sequence[str]) -> str:
    if 0 <= number < len(names):
        return names[number]
    return f"class {number}"


def _style(number: int) -> str:
    red, green, blue = class_color(number)
    return f"--c:rgb({red},{green},{blue})"
