"""Figures, images, text and audio that a run logs: files in `media/` of the run folder, shown by
the report and by trackers.

The name of a file says where in the plan it was logged, and metrics.jsonl has a line for each. A
resume cuts the lines, repeats the steps and writes the same files again: each item is there once.
"""

import io
import logging
import re
import sys
import wave
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from phasetrain.addons.observe.trackers.base import MediaRecord, Tracker
from phasetrain.engine.step_logs import collected
from phasetrain.hooks.base import Run, current_run
from phasetrain.hooks.metrics import record_line
from phasetrain.runtime.png import encode_png

log = logging.getLogger(__name__)

FOLDER = "media"
"""Folder of the files in the run folder."""

MAX_ROW = 8
"""Images that are shown side by side; more are a grid."""

MediaKind = Literal["image", "text", "audio"]

SUFFIXES = {"image": ".png", "text": ".txt", "audio": ".wav"}


@dataclass(frozen=True)
class _Moment:
    """Where in the plan something is logged.

    Attributes:
        run: the run; weak, so that it is freed at its end.
        split: name of the split.
        phase, epoch, step, updates: the position, counting complete steps and the one under way.
        is_in_step: whether a step is under way; else it has just been completed.
        count: updates in training, and steps of the phase in tests.
    """

    run: ReferenceType[Run]
    split: str
    phase: int
    epoch: int
    step: int
    updates: int
    is_in_step: bool
    count: int


_latest: ContextVar[tuple[_Moment, dict[str, int]] | None] = ContextVar("media", default=None)
"""The last moment at which something was logged, and the number of items of each name."""


def log_image(name: str, image: Any, *, every: int = 1) -> None:
    """Log an image from a model, a task, a loss or a hook.

    It becomes a PNG file in `media/` of the run folder, with a line in metrics.jsonl. Rank 0
    writes. Outside of a run nothing happens.

    Args:
        name: name of the image, without a split.
        image: tensor or array: uint8 from 0 to 255, or float from 0 to 1; `(H, W)`, `(C, H, W)`
            with C of 1 or 3, or `(N, C, H, W)` for N images side by side, more than 8 in a grid.
            Or a function that returns it, called only if it is due.
        every: log in every n-th update, in tests in every n-th step of the phase.

    Raises:
        ValueError: it has another shape.
    """
    _log(name, "image", every, lambda: _encode_image(name, _make(image)))


def log_figure(name: str, figure: Any, *, every: int = 1, close: bool = True) -> None:
    """Log a figure of matplotlib, see `log_image`.

    Args:
        name: name of the figure, without a split.
        figure: the figure, or a function that returns it, called only if it is due.
        every: as for `log_image`.
        close: close the figure afterwards.

    Raises:
        ValueError: it is not a figure.
    """
    if close and not callable(figure):
        _close(figure, draw=lambda: _log(name, "image", every, lambda: _draw(name, figure)))
        return

    def draw() -> bytes:
        made = _make(figure)
        return _close(made, draw=lambda: _draw(name, made)) if close else _draw(name, made)

    _log(name, "image", every, draw)


def log_text(name: str, text: str, *, every: int = 1) -> None:
    """Log a text, see `log_image`.

    Args:
        name: name of the text, without a split.
        text: the text, or a function that returns it, called only if it is due.
        every: as for `log_image`.
    """
    _log(name, "text", every, lambda: str(_make(text)).encode())


def log_audio(name: str, samples: Any, rate: int, *, every: int = 1) -> None:
    """Log sound as a WAV file with 16 bits, see `log_image`.

    Args:
        name: name of the sound, without a split.
        samples: float tensor or array from -1 to 1, `(T,)` or `(channels, T)`, or a function that
            returns it, called only if it is due.
        rate: samples per second.
        every: as for `log_image`.

    Raises:
        ValueError: it has another shape.
    """
    _log(name, "audio", every, lambda: _encode_audio(name, _make(samples), rate))


def _log(name: str, kind: MediaKind, every: int, encode: Callable[[], bytes]) -> None:
    if every < 1:
        raise ValueError(f"every = {every} of {name!r}: expected at least 1")
    run = current_run.get()
    if run is None or run.folder is None or not run.world.is_main:
        return
    moment = _find_moment(run)
    if moment.count % every:
        return
    content = encode()
    stem = re.sub(r"[^\w.-]", "_", name)
    file = f"{FOLDER}/{stem}-u{moment.updates:08d}-p{moment.phase}-s{moment.step}"
    if not moment.is_in_step:
        file += "-end"
    number = _count(moment, stem)
    if number > 1:
        file += f"-{number}"
    file += SUFFIXES[kind]
    try:
        run.folder.storage.make_folder(run.folder.file(FOLDER))
        run.folder.storage.replace(run.folder.file(file), content)
    except OSError as error:
        log.warning("phasetrain.log_%s(%r): %s cannot be written: %s", kind, name, file, error)
        return
    position = {
        "updates": moment.updates,
        "phase": moment.phase,
        "split": moment.split,
        "epoch": moment.epoch,
        "step": moment.step,
    }
    record_line(run, {"kind": "media", **position, "name": name, "media": kind, "file": file})
    tag = f"{moment.split}/{name}"
    record = MediaRecord(tag, kind, moment.phase, moment.step, moment.updates, file)
    for hook in run.hooks.by_label.values():
        if isinstance(hook, Tracker):
            hook.write_media(run, record, content)


def _find_moment(run: Run) -> _Moment:
    state = run.state
    is_in_step = collected.get() is not None
    # A phase is counted before `on_phase_end` is called.
    is_over = not is_in_step and not state.step and state.phase > 0
    phase = run.plan.phases[state.phase - is_over]
    step = phase.steps if is_over else state.step + is_in_step
    updates = state.updates + (is_in_step and phase.is_train)
    count = updates if phase.is_train else step
    return _Moment(
        ref(run), phase.split, phase.index, phase.epoch, step, updates, is_in_step, count
    )


def _count(moment: _Moment, stem: str) -> int:
    """Return the number of items of a name at a moment, this one included."""
    latest = _latest.get()
    if latest is None or latest[0] != moment:
        latest = (moment, {})
        _latest.set(latest)
    numbers = latest[1]
    numbers[stem] = numbers.get(stem, 0) + 1
    return numbers[stem]


def _make(value: Any) -> Any:
    if callable(value) and not isinstance(value, Tensor):
        return value()
    return value


def _encode_image(name: str, image: Any) -> bytes:
    pixels = torch.as_tensor(image).detach().cpu()
    if pixels.is_floating_point():
        pixels = pixels.float().nan_to_num().clamp(0, 1).mul(255).round()
    pixels = pixels.to(torch.uint8)
    if pixels.ndim == 4:
        pixels = tile_images(pixels)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels[0] if pixels.shape[0] == 1 else pixels.permute(1, 2, 0)
    elif pixels.ndim != 2:
        raise ValueError(
            f"phasetrain.log_image({name!r}): expected (H, W), (C, H, W) with C of 1 or 3, or "
            f"(N, C, H, W), not {tuple(torch.as_tensor(image).shape)}"
        )
    return encode_png(pixels.contiguous().numpy())


def tile_images(images: Tensor) -> Tensor:
    """Return images `(N, C, H, W)` as one of `(C, H, W)`: up to 8 in a row, more of them in a grid
    with about as many columns as rows, black where images are missing."""
    count = len(images)
    columns = max(1, count if count <= MAX_ROW else isqrt(count - 1) + 1)
    missing = -count % columns
    padded = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
    return torch.cat([torch.cat(list(row), 2) for row in torch.split(padded, columns)], 1)


def _draw(name: str, figure: Any) -> bytes:
    if not hasattr(figure, "savefig"):
        raise ValueError(
            f"phasetrain.log_figure({name!r}): expected a figure of matplotlib, not a "
            f"{type(figure).__name__}; log pixels with phasetrain.log_image"
        )
    buffer = io.BytesIO()
    # Without the version of matplotlib, so that the file depends on the figure alone.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _close(figure: Any, draw: Callable[[], Any]) -> Any:
    try:
        return draw()
    finally:
        # Figures that were made without pyplot have nothing to close.
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close(figure)


def _encode_audio(name: str, samples: Any, rate: int) -> bytes:
    sound = torch.as_tensor(samples).detach().cpu().float()
    if sound.ndim == 1:
        sound = sound[None]
    if sound.ndim != 2:
        raise ValueError(
            f"phasetrain.log_audio({name!r}): expected (T,) or (channels, T), not "
            f"{tuple(sound.shape)}"
        )
    values = sound.nan_to_num().clamp(-1, 1).mul(32767).round().to(torch.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(len(values))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.T.contiguous().numpy().astype("<i2").tobytes())
    return buffer.getvalue()
