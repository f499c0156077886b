"""Writes TensorBoard event files: scalars, and optionally images and histograms."""

import io
import json
import os
import socket
import struct
import time
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasetrain.addons.observe.trackers.base import (
    MediaRecord,
    Record,
    Tracker,
    require_local_folder,
)
from phasetrain.config.checks import check_at_least
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS, Run
from phasetrain.meters import Meter
from phasetrain.runtime.png import encode_png
from phasetrain.runtime.storage import LogFile

BINS = 64
"""Bins of a histogram, from the smallest to the largest value."""

CELL = 16
"""Side of a cell in the image of a confusion matrix, in pixels."""


@HOOKS.register("tensorboard")
class TensorBoard(Tracker):
    """Writes events to `tensorboard/` in the run folder; needs the extra `tensorboard`.

    Every attempt writes a new event file. A resumed run truncates the files to the events that the
    checkpoint covers, so that each step appears once. Nothing is lost while the disk is full.

    Args:
        every_updates: updates between two records of train steps.
        histograms_every: updates between two histograms of all weights and gradients; None writes
            no histograms.
        images: number of inputs to show from the first batch of each test phase, if they are
            images with 1 or 3 channels.
        confusion_matrix: write an image of each meter with a table after each phase; all ranks
            take part.
        hparams: values of the config by dotted path, for the table of runs; passed by the program.
    """

    def __init__(
        self,
        every_updates: int = 10,
        histograms_every: int | None = None,
        images: int = 0,
        *,
        confusion_matrix: bool = True,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every_updates)
        check_at_least(1, histograms_every=histograms_every)
        check_at_least(0, images=images)
        self.histograms_every = histograms_every
        self.images = images
        self.confusion_matrix = confusion_matrix
        # Confusion matrices are summed over all ranks, which therefore have to be called.
        self.main_only = not confusion_matrix
        self.hparams = hparams or {}
        self._events: EventFile | None = None
        self._folder = Path()
        self._covered: dict[str, int] = {}
        self._results: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        """Truncate the event files to the checkpoint, and open the file of this attempt."""
        assert run.folder is not None, "the tensorboard hook needs a run folder"
        folder = require_local_folder(run.folder, "tensorboard")
        try:
            import torch.utils.tensorboard  # noqa: F401 - fails if the extra is not installed
        except ImportError as error:
            raise ConfigError(
                'HOOKS.tensorboard needs TensorBoard: pip install "phasetrain[tensorboard]", or '
                "HOOKS.tensorboard=null",
                code="config.missing_package",
            ) from error
        if not run.world.is_main:
            return
        self._folder = folder / "tensorboard"
        run.folder.storage.make_folder(run.folder.file("tensorboard"))
        for file in self._event_files():
            if file.name in self._covered:
                # os.truncate would fill a shorter file with zeros.
                os.truncate(file, min(self._covered[file.name], file.stat().st_size))
            else:
                file.unlink()
        # TensorBoard orders files by the time in their name.
        now = f"{time.time_ns() / 1e9:.6f}"
        name = f"events.out.tfevents.{now}.{socket.gethostname()}.{run.folder.attempt}"
        self._events = EventFile(run.folder.log(f"tensorboard/{name}"))

    def write(self, run: Run, record: Record) -> None:
        """Write the values of a step or a phase as scalars."""
        if self._events is not None:
            self._events.add_scalars(record.values_by_name(), record.updates)
        if record.kind == "phase":
            self._results |= record.values_by_name()

    def write_media(self, run: Run, record: MediaRecord, content: bytes) -> None:
        """Write an image, a text or a sound."""
        if self._events is not None:
            self._events.add_media(record, content)

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Write some images of the first batch of a test phase."""
        if self.images and not phase.is_train and run.state.step == 0 and self._events is not None:
            image = join_images(batch.input, self.images)
            if image is not None:
                self._events.add_image(f"{phase.split}/images", image, run.state.updates)

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Write histograms of the gradients; a later micro-batch overwrites them."""
        if (
            self.histograms_every
            and self._events
            and (run.state.updates + 1) % self.histograms_every == 0
        ):
            # The update that these gradients belong to is not counted yet, hence `+ 1`.
            for name, parameter in run.task.model.named_parameters():
                if parameter.grad is not None:
                    self._events.add_histogram(
                        f"gradients/{name}", parameter.grad, run.state.updates + 1
                    )

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Write loss, learning rate and histograms of the weights, if they are due."""
        super().on_step(run, phase, out)
        every = self.histograms_every
        if every and self._events and phase.is_train and run.state.updates % every == 0:
            for name, parameter in run.task.model.named_parameters():
                self._events.add_histogram(f"weights/{name}", parameter.detach(), run.state.updates)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Write the metrics of the phase and its confusion matrix."""
        # Collective, so before anything that may fail on rank 0 alone.
        tables = {
            label: meter.all_reduce(run.world).table()
            for label, meter in run.task.meters.items()
            if self.confusion_matrix and metrics and type(meter).table is not Meter.table
        }
        super().on_phase_end(run, phase, metrics)
        for label, table in tables.items():
            if self._events is not None and table:
                image = draw_heat_map(table)
                self._events.add_image(f"{phase.split}/{label}", image, run.state.updates)

    def on_save(self, run: Run) -> None:
        """Flush the events, and remember the sizes of all files."""
        if self._events is not None:
            self._events.file.flush()
            self._covered = {file.name: file.stat().st_size for file in self._event_files()}
            # A full disk may hold back events that were accepted: the size on disk would miss them.
            self._covered[Path(self._events.file.path).name] = self._events.file.size

    def on_end(self, run: Run) -> None:
        """Write the config with the latest metrics, for TensorBoard's table of runs.

        TensorBoard keeps the first entry it finds, so only the attempt that finishes writes one.
        """
        if run.stopping and run.consensus.interrupted:
            return
        if self._events is not None and self.hparams:
            self._events.add_hparams(self.hparams, self._results)

    def close(self) -> None:
        """Flush the events."""
        if self._events is not None:
            self._events.file.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the size of each event file in bytes, and the latest metrics."""
        if self._covered:
            return {"covered": dict(self._covered), "results": dict(self._results)}
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore sizes and metrics; `on_start` truncates the files."""
        self._covered = dict(state["covered"])
        # Checkpoints of an earlier version have no results.
        self._results = dict(state.get("results", {}))

    def _event_files(self) -> list[Path]:
        return sorted(self._folder.glob("events.out.tfevents.*"))


class EventFile:
    """Appends events to a log file in TensorBoard's format.

    torch's SummaryWriter cannot be truncated, and loses events when the disk is full.

    Args:
        file: the log file.
    """

    def __init__(self, file: LogFile) -> None:
        self.file = file
        self._add(file_version="brain.Event:2")

    def add_scalars(self, values: Mapping[str, float], updates: int) -> None:
        """Write named values."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        entries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(summary=Summary(value=entries), step=updates)

    def add_histogram(self, name: str, values: Tensor, updates: int) -> None:
        """Write a histogram of the finite values."""
        from torch.utils.tensorboard.summary import histogram

        finite = values.detach().float().cpu().flatten()
        finite = finite[finite.isfinite()]
        if finite.numel():
            self._add(summary=histogram(name, finite.numpy(), BINS), step=updates)

    def add_image(self, name: str, picture: Tensor, updates: int) -> None:
        """Write an image, uint8 `(H, W, 3)`."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width, _ = picture.shape
        image = Summary.Image(
            height=height,
            width=width,
            colorspace=3,
            encoded_image_string=encode_png(picture.cpu().numpy()),
        )
        self._add(summary=Summary(value=[Summary.Value(tag=name, image=image)]), step=updates)

    def add_media(self, record: MediaRecord, content: bytes) -> None:
        """Write the file of an item: PNG, WAV or text."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import text

        if record.kind == "text":
            self._add(summary=text(record.tag, content.decode()), step=record.updates)
            return
        if record.kind == "image":
            width, height = struct.unpack(">II", content[16:24])  # in the header of a PNG file
            image = Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=content
            )
            value = Summary.Value(tag=record.tag, image=image)
        else:
            with wave.open(io.BytesIO(content)) as file:
                sound = Summary.Audio(
                    sample_rate=file.getframerate(),
                    num_channels=file.getnchannels(),
                    length_frames=file.getnframes(),
                    encoded_audio_string=content,
                    content_type="audio/wav",
                )
            value = Summary.Value(tag=record.tag, audio=sound)
        self._add(summary=Summary(value=[value]), step=record.updates)

    def add_hparams(self, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write the values of a config and the names of the metrics."""
        from torch.utils.tensorboard.summary import hparams

        plain = {}
        for key, value in values.items():
            if not isinstance(value, bool | int | float | str):
                value = json.dumps(value, default=str)
            plain[key] = value
        for summary in hparams(plain, dict(metrics)):
            self._add(summary=summary)

    def _add(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
        self.file.write(record.getvalue())


def join_images(inputs: Any, count: int) -> Tensor | None:
    """Return the first images of a batch side by side, or None if they are not images.

    Args:
        inputs: `(N, C, H, W)` with C of 1 or 3; each image is scaled to the full range.
        count: maximum number of images.

    Returns:
        uint8 `(H, W, 3)`.
    """
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    chosen = inputs[:count].detach().float().cpu()
    low = chosen.amin((1, 2, 3), keepdim=True)
    high = chosen.amax((1, 2, 3), keepdim=True)
    # clamp_min: an image of a single colour has no range.
    shades = ((chosen - low) / (high - low).clamp_min(1e-12) * 255).nan_to_num().to(torch.uint8)
    return torch.cat(list(shades.expand(-1, 3, -1, -1)), 2).permute(1, 2, 0).contiguous()


def draw_heat_map(table: Mapping[str, Mapping[str, float]]) -> Tensor:
    """Return an image of a table, uint8 `(H, W, 3)`: white is 0, blue the largest of its row."""
    values = torch.tensor(
        [list(row.values()) for row in table.values()], dtype=torch.float64
    ).nan_to_num()
    share = values / values.amax(1, keepdim=True).clamp_min(1e-12)
    light = torch.tensor([255.0, 255.0, 255.0])
    dark = torch.tensor([8.0, 48.0, 107.0])
    cells = (light + share[..., None] * (dark - light)).round().to(torch.uint8)
    return cells.repeat_interleave(CELL, 0).repeat_interleave(CELL, 1)
