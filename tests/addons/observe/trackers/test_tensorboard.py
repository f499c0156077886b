"""TensorBoard shows each step once after kills and resumes."""

import errno
import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, records, run_until_killed, train
from PIL import Image
from raising import raises

from phasetrain.addons.observe.trackers.tensorboard import TensorBoard, draw_heat_map, join_images
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook

pytest.importorskip("tensorboard")

WORDS = ("HOOKS.tensorboard.every_updates=1", "HOOKS.report=null", "HOOKS.ledger=null")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (update, value) of every scalar as TensorBoard reads it."""
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.by_default(1)
@pytest.mark.parametrize("kills", [(9,), (3, 12), (9, 9)])
def test_each_step_shows_once(tmp_path: Path, kills: tuple[int, ...]) -> None:
    for steps in kills:
        run_until_killed(tmp_path, *WORDS, hooks={"kill": KillAfter(steps)})
    train(tmp_path, *WORDS)
    found = scalars(tmp_path)
    assert found.keys() == {
        "train/step_loss", "optimizer/lr", "train/accuracy", "train/loss", "test/accuracy", "test/loss",
        "time/samples_per_second",
    }  # fmt: skip
    assert [step for step, _ in found["train/step_loss"]] == list(range(1, 16))
    assert [step for step, _ in found["test/accuracy"]] == [5, 10, 15]
    logged = [record["loss"] for record in records(tmp_path) if record["kind"] == "step"]
    assert [value for _, value in found["train/step_loss"]] == pytest.approx(logged)


def test_a_file_shorter_than_the_checkpoint_covers_is_not_filled_up(tmp_path: Path) -> None:
    run_until_killed(tmp_path, *WORDS, hooks={"kill": KillAfter(9)})
    [file] = (tmp_path / "tensorboard").iterdir()
    with open(file, "r+b") as opened:
        opened.truncate(60)
    train(tmp_path, *WORDS)
    assert file.stat().st_size == 60
    assert [step for step, _ in scalars(tmp_path)["train/step_loss"]][-10:] == list(range(6, 16))


def test_logs_of_other_hooks_are_written(tmp_path: Path) -> None:
    class Norm(HOOKS["metrics"]):  # type: ignore[misc] # any hook will do
        def on_forward(self, run: Any, phase: Any, out: Any) -> None:
            out.logs["norm"] = 2.0

    train(tmp_path, *WORDS, "PHASES.epochs=1", "HOOKS.metrics=null", hooks={"norm": Norm()})
    found = scalars(tmp_path)
    assert found["train/step_norm"] == [(step, 2.0) for step in range(1, 6)]
    assert found["train/norm"] == [(5, 2.0)]


def test_without_tensorboard_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with raises(ConfigError, code="config.missing_package"):
        train(tmp_path, *WORDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with everything that there is to see, killed once."""
    folder = tmp_path_factory.mktemp("pictures")
    words = (
        *WORDS,
        "HOOKS.tensorboard.images=3",
        "HOOKS.tensorboard.histograms_every=5",
        "PHASES.epochs=2",
    )
    words = (*words, "METERS.confusion_matrix={}")
    run_until_killed(folder, *words, hooks={"kill": KillAfter(9)})
    train(folder, *words)
    return folder


@pytest.mark.addon("metrics")
class TestPictures:
    def events(self, folder: Path) -> Any:
        module: Any = importlib.import_module(
            "tensorboard.backend.event_processing.event_accumulator"
        )
        found = module.EventAccumulator(
            str(folder / "tensorboard"), size_guidance={"histograms": 0, "images": 0}
        )
        found.Reload()
        return found

    def test_images_and_confusion_matrix_once_for_each_test(self, folder: Path) -> None:
        found = self.events(folder)
        assert sorted(found.Tags()["images"]) == [
            "test/confusion_matrix",
            "test/images",
            "train/confusion_matrix",
        ]
        images = found.Images("test/images")
        assert [image.step for image in images] == [5, 10]
        shown = Image.open(io.BytesIO(images[0].encoded_image_string))
        assert (shown.size, shown.mode) == ((24, 8), "RGB")  # three digits of 8 x 8, side by side
        assert shown.getextrema()[0] == (0, 255)
        matrix = found.Images("test/confusion_matrix")
        assert [(image.step, image.width, image.height) for image in matrix] == [
            (5, 160, 160),
            (10, 160, 160),
        ]

    def test_histograms_of_weights_and_gradients_are_written(self, folder: Path) -> None:
        found = self.events(folder)
        names = {name for name in found.Tags()["histograms"] if name.startswith("weights/")}
        assert len(names) == 11
        assert {name.replace("weights/", "gradients/") for name in names} | names == set(
            found.Tags()["histograms"]
        )
        for name in found.Tags()["histograms"]:
            assert [one.step for one in found.Histograms(name)] == [5, 10]

    def test_config_and_metrics_are_in_the_table_of_runs(self, folder: Path) -> None:
        tags = self.events(folder).Tags()
        assert "test/accuracy" in tags["scalars"]
        plugin = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
        content = (
            self.events(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        )
        start = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
        assert start["OPTIMIZER.lr"].number_value == 0.1
        assert start["MODEL.name"].string_value == "small_cnn"
        assert start["DATA.TRAIN.drop_last"].number_value == 1

    def test_a_heat_map_is_white_for_nothing_and_dark_for_the_most(self) -> None:
        picture = draw_heat_map({"a": {"a": 3.0, "b": 0.0}, "b": {"a": float("nan"), "b": 0.0}})
        assert picture.shape == (32, 32, 3)
        assert picture[0, 0].tolist() == [8, 48, 107]
        assert picture[0, 31].tolist() == picture[31, 0].tolist() == [255, 255, 255]

    @pytest.mark.parametrize(
        "inputs", [torch.zeros(2, 64), torch.zeros(2, 5, 8, 8), [torch.zeros(2, 1, 8, 8)]]
    )
    def test_what_is_no_image_is_not_shown(self, inputs: Any) -> None:
        assert join_images(inputs, 2) is None


class Stop(Hook):
    """Stops the run for now, after an update or after the last phase."""

    def __init__(self, updates: int = 0) -> None:
        self.updates = updates

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if run.state.updates == self.updates:
            run.stop("enough for now", interrupted=True)

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        if not self.updates and phase.split == "test":
            run.stop("enough for now", interrupted=True)


def test_the_table_of_runs_has_metrics_after_early_and_late_interruptions(tmp_path: Path) -> None:
    words = (*WORDS, "PHASES.epochs=1")
    assert train(tmp_path, *words, hooks={"stop": Stop(1)}).state == "preempted"
    assert train(tmp_path, *words, hooks={"stop": Stop()}).state == "preempted"
    assert train(tmp_path, *words).state == "finished"
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    plugin: Any = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    content = found.SummaryMetadata("_hparams_/experiment").plugin_data.content
    infos = plugin.HParamsPluginData.FromString(content).experiment.metric_infos
    assert {info.name.tag for info in infos} == {
        "train/accuracy",
        "train/loss",
        "test/accuracy",
        "test/loss",
    }


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path: Path) -> None:
    class Full(Hook):
        def on_start(self, run: Any) -> None:
            self.run = run
            run.hooks.by_label["tensorboard"]._events.file._before = self.refuse

        def refuse(self, operation: str, path: str) -> None:
            if self.run.state.updates < 12:
                raise OSError(errno.ENOSPC, "No space left on device", path)

    result = train(tmp_path, *WORDS, "CHECKPOINT.background=false", hooks={"full": Full()})
    assert result.state == "finished"
    assert [step for step, _ in scalars(tmp_path)["train/step_loss"]] == list(range(1, 16))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="histograms_every = 0"):
        TensorBoard(histograms_every=0)
    with pytest.raises(ValueError, match="images = -1"):
        TensorBoard(images=-1)
    with pytest.raises(ValueError, match="every_updates = 0"):
        TensorBoard(every_updates=0)
