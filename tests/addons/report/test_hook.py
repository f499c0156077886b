"""The hook `report`: what it keeps of tests, the report at every kind of end, and that it never
harms a run."""

import base64
import errno
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import detection_parts
import harness
import numpy as np
import pytest
import segment_parts
import torch
from failpoints import refused
from harness import REPORT, SMALL, KillAfter, Killed, differences_of_runs, records, status
from PIL import Image

from phasetrain.addons.report.hook import Report
from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.hooks import Hook
from phasetrain.runs.folder import DiskSpace
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import assert_exact_resume


def predictions(folder: Path) -> Any:
    return json.loads((folder / "predictions.json").read_text())


def train(folder: Path, *overrides: str, hooks: Mapping[str, Hook] | None = None) -> RunResult:
    """Run a small training with the hook, without output."""
    return harness.train(folder, *REPORT, *overrides, hooks=hooks)


def run_and_capture(folder: Path) -> str:
    """Run a small training to its end and return what it prints, each line break a space."""
    stream = io.StringIO()
    words = (*SMALL, *REPORT, f"RUN.dir={folder}", "PHASES.epochs=1")
    assert run(words, terminal=Terminal(stream, live=False)).state == "finished"
    return " ".join(stream.getvalue().split())


class Counts(Hook):
    """Counts confusions in another way, in plain Python."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def on_phase_start(self, run: Any, phase: Any) -> None:
        self.pairs = []

    def on_forward(self, run: Any, phase: Any, out: Any) -> None:
        self.pairs += zip(out.target.tolist(), out.output.argmax(1).tolist(), strict=True)


@pytest.mark.addon("metrics")
def test_a_finished_run_has_confusions_and_samples_of_its_last_test(tmp_path: Path) -> None:
    counts = Counts()
    result = train(tmp_path, hooks={"counts": counts})
    found = predictions(tmp_path)["test"]
    expected = torch.zeros(10, 10, dtype=torch.int64)
    for target, predicted in counts.pairs:
        expected[target, predicted] += 1
    assert len(counts.pairs) == 64
    assert found["confusion"] == expected.tolist()
    assert (found["updates"], found["classes"]) == (15, [str(number) for number in range(10)])
    told = [(int(one["label"]), int(one["prediction"])) for one in found["first"]]
    # Two batches of 32 samples, of which one sorted by class would show its first class only.
    shown = [0, 5, 10, 16, 21, 26, 32, 37, 42, 48, 53, 58]
    assert told == [counts.pairs[place] for place in shown]
    assert [one["index"] for one in found["first"]] == shown
    sure = [one["confidence"] for one in found["mistakes"]]
    assert len(sure) == min(12, sum(target != predicted for target, predicted in counts.pairs[:32]))
    assert sure == sorted(sure, reverse=True)
    assert all(one["label"] != one["prediction"] for one in found["mistakes"])
    assert found["first"][0]["image"].startswith("data:image/png;base64,")
    text = (tmp_path / "report.html").read_text()
    assert 'badge finished">finished<' in text
    assert result.digest[:12] in text


def test_a_run_that_fails_has_a_report_with_the_reason(tmp_path: Path) -> None:
    class Fails(Hook):
        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 7:
                raise RuntimeError("the roof <is> on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        train(tmp_path, hooks={"fails": Fails()})
    text = (tmp_path / "report.html").read_text()
    assert 'badge failed">failed<' in text
    assert "RuntimeError: the roof &lt;is&gt; on fire" in text


def test_attempts_that_were_killed_are_in_the_report(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, hooks={"kill": KillAfter(9)})
    train(tmp_path, "PHASES.epochs=2", "RUN.allow=[PHASES]")
    attempts = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [
        (one["attempt"], one["time"]["attempt"].keys() >= {"train", "save"}) for one in attempts
    ] == [
        (1, True),
    ]
    text = (tmp_path / "report.html").read_text()
    assert text.count('class="bar"') == 3  # two attempts and the run
    assert status(tmp_path)["attempt"] == 2


@pytest.mark.parametrize("end", ["report.html", "predictions.json"])
def test_a_full_disk_is_warned_of_and_ends_nothing(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Storage.replace

    def full(self: Storage, path: str, data: Any, *, durable: bool = True) -> None:
        if path.endswith(end):
            raise refused(errno.ENOSPC)(path)
        replace(self, path, data, durable=durable)

    monkeypatch.setattr(Storage, "replace", full)
    printed = run_and_capture(tmp_path)
    assert status(tmp_path)["state"] == "finished"
    assert "HOOKS.report" in printed
    assert "No space left on device" in printed
    assert (tmp_path / "report.html").exists() == (end != "report.html")


@pytest.mark.parametrize("freed", [True, False])
def test_predictions_are_written_at_the_end_if_the_disk_was_full_after_the_test(
    tmp_path: Path, freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Free(Hook):
        def on_end(self, run: Any, *args: Any) -> None:
            if freed:
                monkeypatch.setattr(DiskSpace, "has_spare", lambda self: True)

    monkeypatch.setattr(DiskSpace, "has_spare", lambda self: False)
    train(tmp_path, "PHASES.epochs=1", hooks={"free": Free()})
    assert (tmp_path / "predictions.json").exists() == freed
    if freed:
        assert predictions(tmp_path)["test"]["updates"] == 5


def test_the_last_room_on_a_disk_is_left_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskSpace, "has_spare", lambda self: False)
    printed = run_and_capture(tmp_path)
    assert printed.count("predictions.json is not written") == 1
    assert printed.count(f"report.html is not written to {tmp_path}") == 1
    assert not {"report.html", "predictions.json"} & {path.name for path in tmp_path.iterdir()}
    assert status(tmp_path)["state"] == "finished"


def test_whatever_goes_wrong_in_a_report_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("phasetrain.addons.report.hook.write_report", broken)
    assert "planted" in run_and_capture(tmp_path)
    assert status(tmp_path)["state"] == "finished"


def test_a_fault_in_a_test_costs_its_predictions_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> dict[str, Any]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Report, "_select_samples", broken)
    train(tmp_path / "ignored", "PHASES.epochs=1")
    assert not (tmp_path / "ignored" / "predictions.json").exists()
    assert (tmp_path / "ignored" / "report.html").exists()
    with pytest.raises(ZeroDivisionError, match="planted"):
        train(tmp_path / "raised", "PHASES.epochs=1", "HOOKS.report.on_exception=raise")


def test_equal_bits_with_and_without(tmp_path: Path) -> None:
    train(tmp_path / "with", "PHASES.epochs=1")
    train(tmp_path / "without", "PHASES.epochs=1", "HOOKS.report=null")
    assert differences_of_runs(tmp_path / "with", tmp_path / "without") == []
    assert not (tmp_path / "without" / "report.html").exists()
    assert not (tmp_path / "without" / "predictions.json").exists()


class StopInTest(Hook):
    """Stops after the first step of the last test."""

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if not phase.is_train and run.state.updates == 10:
            run.stop("for now", interrupted=True)


def test_a_resume_in_the_midst_of_a_test_counts_every_sample_once(tmp_path: Path) -> None:
    train(tmp_path / "whole", "PHASES.epochs=2")
    stopped = train(tmp_path / "resumed", "PHASES.epochs=2", hooks={"stop": StopInTest()})
    assert stopped.state == "preempted"
    assert predictions(tmp_path / "resumed")["test"]["updates"] == 5
    train(tmp_path / "resumed", "PHASES.epochs=2")
    assert predictions(tmp_path / "resumed") == predictions(tmp_path / "whole")


@pytest.mark.slow
def test_without_its_state_the_resumed_test_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "state_dict", lambda self: {})
    train(tmp_path, "PHASES.epochs=2", hooks={"stop": StopInTest()})
    train(tmp_path, "PHASES.epochs=2")
    assert predictions(tmp_path)["test"]["updates"] == 5


@pytest.mark.slow
def test_report_resumes_exactly(tmp_path: Path) -> None:
    assert_exact_resume(
        ["experiment=digits", "MODEL.width=4", "PHASES.epochs=1", "PHASES.limit.train=4"]
    )


@pytest.mark.slow
def test_what_a_lost_attempt_had_found_beyond_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    content = {"test": {"updates": 99}, "other": {"updates": 0}, "odd": 3}
    train(tmp_path, "PHASES.epochs=1")
    (tmp_path / "predictions.json").write_text(json.dumps(content))
    train(tmp_path, "PHASES.epochs=2", "RUN.allow=[PHASES.epochs]")
    assert {split: found["updates"] for split, found in predictions(tmp_path).items()} == {
        "other": 0,
        "test": 10,
    }


def test_a_task_that_tells_no_classes(tmp_path: Path) -> None:
    words = ("LOSS.name=MSELoss", "METERS=null", "PHASES.epochs=1")
    assert train(tmp_path, *words, hooks={"soft": Soft()}).state == "finished"
    assert not (tmp_path / "predictions.json").exists()


class Named(torch.utils.data.Dataset[Any]):
    """Names its classes in an attribute, and has no `facts`."""

    class_names = ("dark", "bright")

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 8, 8), index / 32), index // 16


@pytest.mark.addon("metrics")
def test_names_of_classes_may_be_an_attribute_of_the_dataset(tmp_path: Path) -> None:
    data = [f"DATA.{split}.dataset={__name__}.Named" for split in ("TRAIN", "TEST")]
    train(tmp_path, *data, "MODEL.classes=2", "PHASES.epochs=1")
    assert predictions(tmp_path)["test"]["classes"] == ["dark", "bright"]


SHORT = (
    "PHASES={epochs: 1, limit: {train: 2, test: 2}}",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=20",
    "CHECKPOINT.best.monitor=null",
)


@pytest.mark.feature(
    "report.masks",
    "report with masks of segmentation and boxes of detection, target and prediction side by side",
    "hook `report`",
)
@pytest.mark.addon("vision")
def test_samples_of_segmentation_have_both_masks(tmp_path: Path) -> None:
    train(tmp_path, *segment_parts.WORDS, *SHORT)
    found = predictions(tmp_path)["test"]
    assert found["classes"] == ["nothing", "rectangle", "ring"]
    # Spread over two batches, although samples of one would be enough.
    assert [one["index"] for one in found["masks"]] == [0, 3, 6, 10, 13, 16, 20, 23, 26, 30, 33, 36]
    first = found["masks"][0]
    truth = read_pixels(first["target"])
    mask = segment_parts.DrawnMasks(first=10000)[0]["mask"].numpy()
    assert truth.shape == (16, 16, 3)
    assert not truth[mask < 0].any()
    # The colors are blended with gray values, so blue and orange stay apart.
    assert (truth[mask == 0][:, 2] > truth[mask == 0][:, 0]).all()
    assert (truth[mask == 1][:, 2] < truth[mask == 1][:, 0]).all()
    assert 0 <= first["right"] <= 1
    assert "Masks of the test" in (tmp_path / "report.html").read_text()


@pytest.mark.feature("report.masks")
@pytest.mark.addon("libraries", "vision")
def test_samples_of_detection_have_both_boxes(tmp_path: Path) -> None:
    train(tmp_path, *detection_parts.WORDS, *SHORT)
    found = predictions(tmp_path)["test"]
    dataset = detection_parts.DrawnBoxes(first=10000)
    assert len(found["boxes"]) == 12
    for one in found["boxes"]:
        expected = dataset[one["index"]]
        assert [box["box"] for box in one["target"]] == expected["boxes"].tolist()
        assert [box["class"] for box in one["target"]] == expected["labels"].tolist()
        scores = [box["score"] for box in one["prediction"]]
        assert scores == sorted(scores, reverse=True)
        assert (one["size"], len(scores)) == ([16, 16], 16)
    assert "Boxes of the test" in (tmp_path / "report.html").read_text()


def read_pixels(image: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))))


class Soft(Hook):
    """Makes of classes what a regression learns from."""

    def on_batch(self, run: Any, phase: Any, batch: Batch) -> Batch:
        target = torch.nn.functional.one_hot(batch.target, 10).float()
        return Batch(batch.input, target, batch.ids, batch.size, batch.mask)


class Twice(Hook):
    """Makes two rows of scores of each sample, as a model of token sequences does."""

    def on_forward(self, run: Any, phase: Any, out: StepOutput) -> StepOutput:
        out.output = out.output.repeat_interleave(2, 0)
        out.target = out.target.repeat_interleave(2)
        if out.mask is not None:
            out.mask = out.mask.repeat_interleave(2)
        return out


@pytest.mark.addon("metrics")
def test_rows_of_scores_that_are_not_samples_are_counted_and_not_shown(tmp_path: Path) -> None:
    words = ("PHASES.epochs=1", "HOOKS.report.on_exception=raise")
    train(tmp_path, *words, hooks={"twice": Twice()})
    found = predictions(tmp_path)["test"]
    assert sum(map(sum, found["confusion"])) == 128
    assert "first" not in found


def test_samples_and_confusion_can_be_turned_off(tmp_path: Path) -> None:
    train(tmp_path, "HOOKS.report.samples=0", "HOOKS.report.confusion=false", "PHASES.epochs=1")
    assert predictions(tmp_path)["test"] == {"updates": 5}
    with pytest.raises(ValueError, match="samples = -1"):
        Report(samples=-1)


def test_report_without_the_addon_metrics_has_samples_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasetrain.addons.report.hook.METERS", {})
    train(tmp_path, "PHASES.epochs=1")
    assert sorted(predictions(tmp_path)["test"]) == ["first", "mistakes", "updates"]


def test_train_steps_are_left_alone(tmp_path: Path) -> None:
    train(tmp_path, "DATA.TEST=null", "CHECKPOINT.best.monitor=null", "PHASES.epochs=1")
    assert not (tmp_path / "predictions.json").exists()
    assert (tmp_path / "report.html").exists()
    assert len(records(tmp_path)) > 0


class Thresholds(torch.nn.Module):
    """The loss of an ordinal model: a score for each threshold between two classes."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        above = target[:, None] > torch.arange(output.shape[1])
        return torch.nn.functional.binary_cross_entropy_with_logits(output, above.float())


class Wholes(torch.utils.data.Dataset[Any]):
    """A regression whose targets are whole numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 8, 8), index / 32), torch.tensor([float(index % 2)])


@pytest.mark.parametrize(
    "words",
    [
        (f"LOSS={{name: {__name__}.Thresholds}}", "MODEL.classes=9"),
        (
            *(f"DATA.TRAIN.dataset={__name__}.Wholes", f"DATA.TEST.dataset={__name__}.Wholes"),
            *(
                "LOSS={name: MSELoss}",
                "~MODEL.width",
                "~MODEL.dropout",
                "MODEL.name=mlp",
                "MODEL.classes=1",
            ),
        ),
    ],
    ids=["ordinal", "regression"],
)
def test_outputs_that_are_not_scores_of_classes_are_not_shown_as_predictions(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    more = ("METERS.accuracy=null", "CHECKPOINT.best.monitor=-test/loss", "PHASES.epochs=1")
    train(tmp_path, *words, *more)
    assert not (tmp_path / "predictions.json").exists()
