"""Commands that use the model say that tests measure the outputs of a custom task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, train
from torch import nn

import phasetrain
from phasetrain.addons.deploy.export import export
from phasetrain.addons.deploy.extract.feature_files import read_index
from phasetrain.addons.deploy.predict.predict import find_output_form, predict
from phasetrain.addons.deploy.predict.raw_inputs import InputReader
from phasetrain.addons.deploy.task_forward import (
    describe_task_call,
    find_task_forward,
    log,
    warn_of_task_forward,
)
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.tasks import TASKS, Supervised
from phasetrain.testing.build import build_run


@TASKS.register("forward_mirrored")
class Mirrored(Supervised):
    """Tests with the mean over an image and its mirror image."""

    def forward(self, batch: Batch) -> StepOutput:
        if self.model.training:
            return super().forward(batch)
        output = (self.model(batch.input) + self.model(batch.input.flip(-1))) / 2
        return StepOutput(
            self.loss(output, batch.target), batch.size, batch.size, output, batch.target
        )


class Indirect(Mirrored):
    pass


class Scaled(Supervised):
    def output_of(self, batch: Batch) -> Any:
        return 2 * super().output_of(batch)


class Renamed(Supervised):
    pass


class Decoded(Mirrored):
    def _predict_slice(self, tensors: Any, part: slice) -> Any:
        return super()._predict_slice(tensors, part)


@pytest.mark.parametrize(
    ("task", "method"),
    [
        (Mirrored, f"forward ({__name__}.Mirrored)"),
        (Indirect, f"forward ({__name__}.Mirrored)"),
        (Scaled, f"output_of ({__name__}.Scaled)"),
        (Renamed, None),
        (Supervised, None),
        (Decoded, f"forward ({__name__}.Mirrored)"),
        (lambda parts: nn.Identity(), None),
    ],
)
def test_only_methods_of_custom_tasks_count(task: Any, method: str | None) -> None:
    assert find_task_forward(task) == method


@pytest.mark.parametrize(
    ("task", "is_classifier"), [("supervised", True), ("forward_mirrored", False)]
)
def test_loss_that_a_custom_forward_may_not_use_shows_no_classifier(
    task: str, *, is_classifier: bool
) -> None:
    made = build_run([*SMALL, f"TASK.name={task}", "METERS.accuracy=null"])
    assert find_output_form(made.task, InputReader({}, {})).is_classifier is is_classifier


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Supervised, None),
        (Scaled, f"output_of ({__name__}.Scaled)"),
        (Decoded, "task Decoded"),
        (lambda parts: nn.Identity(), None),
    ],
)
def test_task_that_calls_the_model_in_its_own_way_is_named(task: Any, words: str | None) -> None:
    advice = describe_task_call(task)
    assert bool(advice) is (words is not None)
    assert (words or "") in advice


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirrored") / "run"
    words = ["TASK.name=forward_mirrored", "PHASES.epochs=1", "RUN.rehearse=false"]
    phasetrain.run([*SMALL, *words, f"RUN.dir={folder}"])
    return folder


def extract_test(folder: Path, out: Path) -> None:
    words = ("TASK.name=forward_mirrored", "EXTRACT.splits=[test]")
    train(folder, "RUN.engine=extract", f"EXTRACT.dir={out}", *words)
    assert read_index(f"{out}/test")["task_forward_used"] is False


def predict_one(folder: Path, out: Path) -> None:
    torch.save(torch.rand(1, 1, 8, 8), f"{out}.pt")
    predict(str(folder), [f"{out}.pt"])


@pytest.mark.parametrize(("decodes", "count"), [(False, 1), (True, 0)])
def test_task_that_decodes_predicts_by_itself(
    monkeypatch: pytest.MonkeyPatch, *, decodes: bool, count: int
) -> None:
    named: list[str] = []
    monkeypatch.setattr(log, "warning", lambda message, method: named.append(method))
    warn_of_task_forward(Decoded, decodes=decodes)
    assert len(named) == count


@pytest.mark.parametrize(
    "command",
    [
        extract_test,
        predict_one,
        lambda folder, out: phasetrain.pack(folder, f"{out}.zip"),
        lambda folder, out: export(str(folder), f"{out}.pt2"),
    ],
    ids=["extract", "predict", "pack", "export"],
)
def test_each_command_names_the_class_once(
    command: Callable[[Path, Path], object],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[str] = []
    # Not by caplog: a run keeps its lines from the handlers of the root logger.
    monkeypatch.setattr(log, "warning", lambda message, method: named.append(method))
    command(folder, tmp_path / "out")
    assert named == [f"forward ({__name__}.Mirrored)"]


class Thresholds(nn.Module):
    """The loss of an ordinal model: a score for each threshold between two classes."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        above = target[:, None] > torch.arange(output.shape[1])
        return nn.functional.binary_cross_entropy_with_logits(output, above.float())


def test_scores_that_are_not_one_per_class_are_not_decoded(tmp_path: Path) -> None:
    words = (
        *(f"LOSS={{name: {__name__}.Thresholds}}", "MODEL.classes=9", "PHASES.epochs=1"),
        *("METERS.accuracy=null", "CHECKPOINT.best.monitor=-test/loss"),
    )
    train(tmp_path / "run", *words)
    train(
        tmp_path / "run",
        *("RUN.engine=extract", f"EXTRACT.dir={tmp_path}/out", "EXTRACT.splits=[test]"),
        *words,
    )
    columns = read_index(f"{tmp_path}/out/test")["columns"]
    assert "scores" in columns
    assert "label" not in columns
