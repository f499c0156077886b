"""Figures, images, texts and sounds are in the run folder and in TensorBoard once, after any kills."""

import importlib
import io
import re
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import KillAfter, records, run_until_killed, train
from PIL import Image

import phasetrain
from phasetrain.addons.observe.media import tile_images
from phasetrain.hooks import Hook

WORDS = ("PHASES.epochs=2",)


class Show(Hook):
    """Logs an item of each kind, in forward passes, after steps and at the end of phases."""

    observe_only = True

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        with torch.no_grad():
            phasetrain.log_image("weights", out.output[:4].sigmoid(), every=2)

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if phase.is_train:
            phasetrain.log_text("loss", f"{float(out.loss):.6f}", every=5)
            phasetrain.log_text("loss", lambda: "again", every=5)

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        if phase.is_train:
            return
        plt = pytest.importorskip("matplotlib.pyplot")
        figure, axes = plt.subplots(figsize=(1, 1))
        axes.plot(list(metrics.values()))
        phasetrain.log_figure("test metrics", figure)
        assert not plt.fignum_exists(figure.number)
        phasetrain.log_audio("sine", torch.linspace(0, 6, 80).sin(), 8000)


def read_media(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "media").iterdir())}


def media_lines(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["kind"] == "media"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("unbroken")
    words = ("HOOKS.tensorboard={}", "HOOKS.report={}")
    train(folder, *WORDS, *words, hooks={"show": Show()})
    return folder


@pytest.mark.feature(
    "media",
    "figures, images, texts and sounds in the report and in trackers",
    "`phasetrain.log_figure`, `log_image`, `log_text`, `log_audio`",
)
def test_each_item_has_a_file_and_a_line(unbroken: Path) -> None:
    assert list(read_media(unbroken)) == sorted(
        [
            *("loss-u00000005-p0-s5-end.txt", "loss-u00000005-p0-s5-end-2.txt"),
            *("loss-u00000010-p2-s5-end.txt", "loss-u00000010-p2-s5-end-2.txt"),
            *("sine-u00000005-p1-s2-end.wav", "sine-u00000010-p3-s2-end.wav"),
            *("test_metrics-u00000005-p1-s2-end.png", "test_metrics-u00000010-p3-s2-end.png"),
            *(f"weights-u{update:08d}-p0-s{update}.png" for update in (2, 4)),
            *(f"weights-u{update:08d}-p2-s{update - 5}.png" for update in (6, 8, 10)),
            *("weights-u00000005-p1-s2.png", "weights-u00000010-p3-s2.png"),
        ]
    )
    lines = media_lines(unbroken)
    assert {line["file"].removeprefix("media/") for line in lines} == read_media(unbroken).keys()
    figure = next(line for line in lines if line["name"] == "test metrics")
    assert {key: figure[key] for key in ("updates", "phase", "split", "epoch", "step", "media")} == {
        "updates": 5, "phase": 1, "split": "test", "epoch": 0, "step": 2, "media": "image",
    }  # fmt: skip


def test_content_of_the_files(unbroken: Path) -> None:
    files = read_media(unbroken)
    image = Image.open(io.BytesIO(files["weights-u00000002-p0-s2.png"]))
    assert image.size == (10, 4)
    assert files["loss-u00000005-p0-s5-end-2.txt"] == b"again"
    with wave.open(io.BytesIO(files["sine-u00000005-p1-s2-end.wav"])) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (8000, 80, 1)
        values = np.frombuffer(file.readframes(80), "<i2")
    assert values[0] == 0
    assert values.max() == pytest.approx(32767, abs=50)


@pytest.mark.feature("media")
@pytest.mark.parametrize("kills", [(3, 6), (8, 3)])
def test_kills_change_no_item(unbroken: Path, tmp_path: Path, kills: tuple[int, ...]) -> None:
    for steps in kills:
        run_until_killed(tmp_path, *WORDS, hooks={"show": Show(), "kill": KillAfter(steps)})
    train(tmp_path, *WORDS, hooks={"show": Show()})
    assert read_media(tmp_path) == read_media(unbroken)
    assert media_lines(tmp_path) == media_lines(unbroken)


def test_tensorboard_has_each_item_once(unbroken: Path) -> None:
    pytest.importorskip("tensorboard")
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(unbroken / "tensorboard"), size_guidance={"images": 0})
    found.Reload()
    assert [event.step for event in found.Images("train/weights")] == [2, 4, 6, 8, 10]
    assert [event.step for event in found.Images("test/test metrics")] == [5, 10]
    assert [event.step for event in found.Audio("test/sine")] == [5, 10]
    assert "train/loss/text_summary" in found.Tags()["tensors"]


def test_report_shows_the_newest_items(unbroken: Path) -> None:
    page = (unbroken / "report.html").read_text()
    assert page.count("<h3>train/weights</h3>") == 1
    assert page.count("weights-u000000") == 3 + 2
    assert page.count('src="data:audio/wav;base64,') == 2
    assert "<pre>again</pre>" in page
    assert "media-src data:" in page


def test_nothing_is_logged_outside_of_a_run(tmp_path: Path) -> None:
    phasetrain.log_image("x", torch.zeros(2))  # not even its shape is looked at
    train(tmp_path, "PHASES.epochs=1")
    assert not (tmp_path / "media").exists()


@pytest.mark.parametrize(("count", "size"), [(1, (2, 3)), (8, (2, 24)), (9, (6, 9)), (10, (6, 12))])
def test_many_images_are_a_grid(count: int, size: tuple[int, int]) -> None:
    images = torch.arange(1, count + 1).view(-1, 1, 1, 1).expand(-1, 1, 2, 3)
    (tiled,) = tile_images(images)
    assert tuple(tiled.shape) == size
    corners = tiled[::2, ::3].flatten().tolist()
    assert corners == [*range(1, count + 1), *[0] * (len(corners) - count)]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda: phasetrain.log_image("x", torch.zeros(3)), "log_image('x')"),
        (lambda: phasetrain.log_image("x", torch.zeros(2, 3, 3)), "log_image('x')"),
        (lambda: phasetrain.log_audio("x", torch.zeros(1, 2, 3), 1), "log_audio('x')"),
        (lambda: phasetrain.log_figure("x", torch.zeros(3)), "log_figure('x')"),
        (lambda: phasetrain.log_text("x", "y", every=0), "every = 0"),
    ],
)
def test_wrong_values_are_errors(tmp_path: Path, log: Callable[[], None], message: str) -> None:
    class Wrong(Hook):
        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            log()

    with pytest.raises(ValueError, match=re.escape(message)):
        train(tmp_path, "PHASES.epochs=1", hooks={"wrong": Wrong()})
