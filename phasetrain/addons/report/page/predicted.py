"""Predictions of a model: its confusion matrix, and samples with label and prediction."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phasetrain.addons.report.images import PREFIX
from phasetrain.addons.report.page.reading import Array, PredictionsRecord, RunReport
from phasetrain.runs.records import READ_ERRORS, parse_number
from phasetrain.runtime.html import element, escape_text, table

MAX_DRAWN_CLASSES = 40
"""Maximum number of classes of a matrix that is drawn."""

MAX_NUMBERED_CLASSES = 20
"""Maximum number of classes of a matrix with numbers in its cells."""

MAX_NAME = 12
"""Maximum length of the name of a class in a matrix or below an image."""

MAX_CONFUSIONS = 12
"""Number of most frequent confusions that are listed."""

GROUPS = {
    "first": "Samples of the test",
    "mistakes": "Mistakes in the first batch, the most confident first",
}
"""Group of samples -> heading."""


def predictions_section(run: RunReport) -> str:
    """Return confusion matrix and samples of the last test of each split."""
    parts = []
    for split, predictions in run.predictions.items():
        try:
            short = shorten_names(_list_names(predictions))
            groups = _draw_groups(predictions, short)
            content = _draw_matrix(predictions, short)
            if groups:
                content += element("div", groups, cls="groups")
            if any(predictions.pictures.values()):
                from phasetrain.addons.report.page.overlays import draw_pictures

                content += draw_pictures(predictions)
            at = f"after {predictions.updates:,} updates"
        except READ_ERRORS as error:
            run.problems.append(f"predictions.json: the entry of {split} cannot be read ({error}).")
            continue
        if content:
            heading = element("h3", escape_text(split) + " " + element("span", at, cls="note"))
            parts.append(heading + element("div", content, cls="predictions"))
    return "".join(parts)


def read_confusion(predictions: PredictionsRecord) -> tuple[list[str], Array] | None:
    """Return class names and counts `(C, C)`, with a row per true class; None if there are none.

    Raises:
        ValueError: the counts do not fit the classes.
    """
    if not predictions.confusion:
        return None
    counts = np.array(predictions.confusion, dtype=np.float64)
    names = list(predictions.classes)
    if counts.shape != (len(names), len(names)):
        raise ValueError(
            f"the confusion matrix has the shape {counts.shape}, and there are {len(names)} classes"
        )
    return names, counts


def _draw_matrix(predictions: PredictionsRecord, short: Mapping[str, str]) -> str:
    matrix = read_confusion(predictions)
    if matrix is None:
        return ""
    names, counts = matrix
    right = float(np.trace(counts))
    total = float(counts.sum())
    title = f"Confusion matrix: {right:,.0f} of {total:,.0f} right"
    drawn = ""
    if len(names) <= MAX_DRAWN_CLASSES:
        drawn = _draw_cells(names, counts, short)
    meaning = element("span", "rows: true class, columns: predicted class")
    text = element("figcaption", element("b", escape_text(title)) + " " + meaning)
    return element("figure", text + drawn + _list_confusions(names, counts), cls="confusion")


def _draw_cells(names: Sequence[str], counts: Array, short: Mapping[str, str]) -> str:
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)  # a class may have no sample
    numbered = len(names) <= MAX_NUMBERED_CLASSES
    rows = [
        element(
            "tr",
            element("th")
            + "".join(
                element("th", escape_text(short[name]), scope="col", title=name) for name in names
            ),
        )
    ]
    for row, name in enumerate(names):
        cells = [element("th", escape_text(short[name]), scope="row", title=name)]
        for column, other in enumerate(names):
            count = counts[row, column]
            part = float(share[row, column])
            hint = f"{name} predicted as {other}: {count:,.0f}, {100 * part:.1f} %"
            text = style = ""
            if count:
                # The power lifts small shares: mistakes of a few percent would look white.
                style = f"--p:{100 * part**0.6:.0f}%"
            if count and numbered:
                text = f"{count:,.0f}"
            cls = "right" if row == column else "wrong"
            if part > 0.4:
                cls += " strong"
            cells.append(element("td", text, cls=cls, style=style, title=hint))
        rows.append(element("tr", "".join(cells)))
    cls = "matrix"
    if not numbered:
        cls = "matrix small"
    whole = element("table", "".join(rows), cls=cls)
    return element("div", whole, cls="scroll")


def _list_confusions(names: Sequence[str], counts: Array) -> str:
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    # Stable, so that equal runs have equal reports.
    order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSIONS]
    rows = []
    for flat_index in order.tolist():
        row, column = divmod(flat_index, len(names))
        if wrong[row, column] > 0:
            part = 100 * wrong[row, column] / counts[row].sum()
            rows.append(
                (
                    escape_text(names[row]),
                    escape_text(names[column]),
                    f"{wrong[row, column]:,.0f}",
                    f"{part:.1f} %",
                )
            )
    if not rows:
        return ""
    listed = table(
        ("true class", "predicted as", "samples", "share of that class"), rows, cls="figures"
    )
    return element("details", element("summary", "most frequent confusions") + listed)


def _draw_groups(predictions: PredictionsRecord, short: Mapping[str, str]) -> str:
    parts = []
    for key, title in GROUPS.items():
        samples = predictions.samples.get(key)
        if samples:
            cards = "".join(_draw_sample(sample, short) for sample in samples)
            head = element("figcaption", element("b", title))
            parts.append(element("figure", head + element("div", cards, cls="samples")))
    return "".join(parts)


def _draw_sample(sample: Mapping[str, Any], short: Mapping[str, str]) -> str:
    name = str(sample["label"])
    other = str(sample["prediction"])
    image = str(sample.get("image") or "")
    hint = f"sample {sample.get('index', '?')}"
    # only data URLs: an address in a damaged file must not be loaded
    picture = element("span", "no image", cls="none")
    if image.startswith(PREFIX):
        picture = f'<img src="{escape_text(image)}" alt="{escape_text(hint)}">'
    sure = parse_number(sample.get("confidence"))
    label = element("span", escape_text(short[name]), cls="label", title=name)
    predicted = element("b", escape_text(short[other]))
    if sure == sure:  # not NaN
        predicted += f" {100 * sure:.0f} %"
    text = label + element("span", "→ " + predicted, cls="prediction", title=other)
    cls = "sample right" if name == other else "sample wrong"
    return element("div", picture + text, cls=cls, title=hint)


def _list_names(predictions: PredictionsRecord) -> list[str]:
    """Return the names of all classes, labels and predictions."""
    shown = [sample for samples in predictions.samples.values() for sample in samples]
    shown_names = [str(sample[key]) for sample in shown for key in ("label", "prediction")]
    return list(dict.fromkeys([*predictions.classes, *shown_names]))


def shorten_names(names: Sequence[str]) -> dict[str, str]:
    """Return name -> text of at most 12 characters.

    Names often begin alike (`northern_flicker`, `northern_shoveler`): the words that all of them
    begin with are left out, and what is still too long loses its middle.
    """
    if all(len(name) <= MAX_NAME for name in names):
        return {name: name for name in names}
    words = [re.split(r"(?<=[\W_])(?=[^\W_])", name) for name in names]
    start = ""
    # The last word of each name stays.
    for same in zip(*(each[:-1] for each in words), strict=False):
        if len(names) == 1 or len(set(same)) > 1:
            break
        start += same[0]
    return {name: _omit_middle(f"…{name[len(start) :]}" if start else name) for name in names}


def _omit_middle(name: str) -> str:
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:5]}…{name[-6:]}"
