"""A student's loss has a soft and a hard part, and its teacher neither learns nor changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.addons.vision.distillation import Distillation, Teacher
from phasetrain.addons.vision.soft_targets import SoftTargets
from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.models.sources import parse_sources
from phasetrain.models.weights import load_pretrained
from phasetrain.optim import Updater
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, Position
from phasetrain.tasks.parts import StepEvents

AT = Position("train", updates=0, step=0, where=0.0)
TRAIN, TEST = Phase(0, "train", 0, 0, 2, 0, 8, 4), Phase(1, "test", 0, 0, 1, 0, 4, 4)


def teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def make(section: Mapping[str, Any], where: str) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, section.get("classes", 2))
    )
    load_pretrained(model, parse_sources(section["weights"], f"{where}.weights"), World())
    return model


@pytest.fixture
def file(tmp_path: Path) -> str:
    torch.save(teacher().state_dict(), tmp_path / "teacher.pt")
    return str(tmp_path / "teacher.pt")


def made(
    file: str, soft_share: float = 0.25, *, train: bool = True, **section: Any
) -> Distillation:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.1)) if train else None
    parts = Parts(
        model, nn.CrossEntropyLoss(), {}, updater, {}, Machine(torch.device("cpu")), World(), 0
    )
    return Distillation(parts, make, {"name": "any", "weights": file, **section}, 2.0, soft_share)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    return Batch(
        torch.randn(5, 3, generator=generator), torch.tensor([0, 1, 1, 0, 1]), torch.arange(5), 5
    )


def test_loss_is_mixed_in_training_and_hard_in_tests(file: str) -> None:
    task, given = made(file), batch()
    task.begin(TRAIN, fresh=True)
    out = task.forward(given)
    scores = task.model(given.input)
    soft = SoftTargets(2.0)(scores, teacher().eval()(given.input))
    hard = nn.functional.cross_entropy(scores, given.target)
    torch.testing.assert_close(out.loss, 0.25 * soft + 0.75 * hard)
    torch.testing.assert_close(
        torch.stack(list(out.logs.values())), torch.stack([soft, hard]).detach()
    )
    assert list(out.logs) == ["loss_soft", "loss_hard"]
    task.begin(TEST, fresh=True)
    torch.testing.assert_close(task.forward(given).loss, hard)


def test_teacher_does_not_change(file: str) -> None:
    task = made(file)
    task.begin(TRAIN, fresh=True)
    assert task.teacher is not None
    for _ in range(3):
        task.train_step([batch()], AT, StepEvents())
    found, was = task.teacher.model.state_dict(), teacher().state_dict()
    assert all(torch.equal(found[name], was[name]) for name in was)
    assert all(one.grad is None for one in task.teacher.model.parameters())
    assert not task.teacher.model.training


def test_checkpoint_rejects_another_teacher(file: str) -> None:
    task = made(file)
    state = task.stateful()["teacher"].state_dict()
    assert state == {"digest": Teacher(teacher()).digest}
    task.stateful()["teacher"].load_state_dict(state)
    other = teacher()
    with torch.no_grad():
        other[0].bias[0] += 1e-6
    with pytest.raises(ValueError, match=r"TASK\.teacher\.weights"):
        Teacher(other).load_state_dict(state)


def test_log_of_the_weights_names_the_teacher(file: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "phasetrain"):
        made(file)
    messages = [record.message for record in caplog.records if "all" in record.message]
    assert messages == ["TASK.teacher.weights: all 9 tensors of the model are loaded"]
    assert "TASK.teacher.weights: weights from source 0: " in caplog.text


def test_task_for_a_test_has_no_teacher(file: str) -> None:
    Path(file).unlink()
    task = made(file, train=False)
    assert task.teacher is None
    assert "teacher" not in task.stateful()


def test_bad_settings_are_rejected(file: str) -> None:
    with raises(ConfigError, key="TASK.soft_share", given="1.5"):
        made(file, 1.5)
    with raises(ConfigError, key="TASK.teacher.weights"):
        made(file, weights=None)
    with raises(ConfigError, key="TASK.teacher.weights.path"):
        made(file, classes=3)
