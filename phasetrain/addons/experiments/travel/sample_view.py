"""Shows a sample of a past update: a picture or text as drawn, and where else it is seen."""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from phasetrain.addons.experiments.travel.forks import SampleScore, list_samples, select_rows
from phasetrain.addons.experiments.travel.sample_order import SampleOrder
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.config.addons import find_service
from phasetrain.engine.plan import TRAIN
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import shorten
from phasetrain.runtime.nested import list_tensors
from phasetrain.runtime.png import encode_png

MAX_TEXT = 400
"""Maximum number of characters of a text."""

MAX_UPDATES = 50
"""Maximum number of updates with a sample that are listed."""


def show_sample(visit: Visit, score: SampleScore) -> dict[str, Any]:
    """Return the facts about a sample of the update before which a visit stands, for programs.

    Returns:
        `id`, `place`, `loss` and `gradient_norm` as measured alone; `input` and `target` as text;
        `image`, `stored_image` (data URLs, as drawn and as in the dataset) and `text` if it has
        one; `seed` of its augmentation, and `updates`, all updates with it.
    """
    batch, row, _ = list_samples(visit.batches)[score.place]
    alone = select_rows(batch, [row])
    shown: dict[str, Any] = {
        "id": score.id,
        "place": score.place,
        "loss": score.loss,
        "gradient_norm": score.gradient_norm,
        "input": _describe(alone.input),
        "target": _describe(alone.target),
        "image": _draw(alone.input, is_batch=True),
        "text": _decode(visit, alone.input),
    }
    if score.id is None:
        return shown
    dataset = visit.past.data[TRAIN].reader.dataset
    sample = dataset[score.id]
    stored = sample[0] if isinstance(sample, tuple | list) else sample
    shown["stored_image"] = _draw(stored, is_batch=False)
    try:
        table = SampleOrder(visit.past).find_sample(score.id)
    except ConfigError:
        return shown  # a stream or a custom loader: its order is unknown
    updates = table.columns["update"].tolist()
    seeds = dict(zip(updates, table.columns["seed"].tolist(), strict=True))
    return {**shown, "seed": seeds.get(visit.update) or None, "updates": updates[:MAX_UPDATES]}


def _describe(value: Any) -> str:
    """Return form and values of one sample, such as `float32 (1, 8, 8), -0.4 to 1`."""
    parts = []
    for tensor in list_tensors(value):
        one = tensor[0] if tensor.ndim else tensor
        numbers = one.detach().double().cpu().flatten()
        if len(numbers) == 1:
            parts.append(f"{float(numbers):g}")
        elif len(numbers):
            name = str(tensor.dtype).removeprefix("torch.")
            low, high = float(numbers.min()), float(numbers.max())
            parts.append(f"{name} {tuple(one.shape)}, {low:.4g} to {high:.4g}")
    return "; ".join(parts)


def _draw(value: Any, *, is_batch: bool) -> str | None:
    """Return a picture as a data URL, as the report draws it; None if it is none."""
    normalize = find_service("normalize_pixels")
    tensors = list_tensors(value) if isinstance(value, Tensor | dict | list | tuple) else [value]
    if normalize is None or not tensors:
        return None
    first = tensors[0]
    array = first.detach().cpu().float().numpy() if isinstance(first, Tensor) else np.asarray(first)
    if is_batch:
        array = array[0]
    if array.dtype.kind not in "biuf":
        return None
    pixels = normalize(array)
    if pixels is None:
        return None
    return f"data:image/png;base64,{b64encode(encode_png(pixels)).decode()}"


def _decode(visit: Visit, value: Any) -> str | None:
    """Return the text of a sample of tokens; None if the dataset has no tokenizer."""
    open_codec = find_service("open_dataset_codec")
    section: Mapping[str, Any] = visit.task.config.DATA.TRAIN
    if open_codec is None or not isinstance(value, Tensor) or value.ndim != 2:
        return None
    try:
        text = open_codec(section).decode(value[0].tolist())
    except (ConfigError, ValueError, OSError):
        return None
    return shorten(str(text), MAX_TEXT)
