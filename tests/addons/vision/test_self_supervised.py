"""The teacher, frozen prototypes, skipped updates, and settings that are rejected before training."""

from dataclasses import replace
from math import cos, nan, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.addons.vision.self_supervised import SelfSupervised, spread
from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError
from phasetrain.optim.update.guard import NonFiniteGuard
from phasetrain.tasks import Position
from phasetrain.tasks.parts import StepEvents
from phasetrain.testing.build import build_run

SMALL = ["DATA.TRAIN.batch_size=16", "DATA.TEST.batch_size=16", "OPTIMIZER.SCHEDULES.lr=null"]


class Steps:
    """A task, and its steps on batches of the training data."""

    def __init__(self, *words: str) -> None:
        made = build_run([*SMALL, *words])
        assert isinstance(made.task, SelfSupervised)
        self.task, self.phase, self.updates = made.task, made.plan.phases[0], 0
        self.test = next(phase for phase in made.plan.phases if not phase.is_train)
        self.task.begin(self.phase, fresh=True)
        self.batches = self.task.batches(self.phase, 0)

    def step(
        self, spoil: bool = False, where: float = 0.25, events: StepEvents | None = None
    ) -> Any:
        (batch,) = next(iter(self.batches))
        if spoil:
            batch = replace(batch, input=[batch.input[0] * nan, *batch.input[1:]])
        at = Position("train", self.updates, self.updates, where, 16)
        self.updates += 1
        return self.task.train_step([batch], at, events or StepEvents())

    def state(self) -> dict[str, Tensor]:
        parts = {
            "model": self.task.parts.model,
            "loss": self.task.parts.loss,
            "teacher": self.task.teacher,
        }
        return {
            f"{name}.{key}": value.clone()
            for name, part in parts.items()
            if part is not None
            for key, value in part.state_dict().items()
        }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {key for key in before if not torch.equal(before[key], after[key])}


def test_momentum_of_the_teacher_is_a_cosine_of_progress() -> None:
    steps = Steps("experiment=digits_byol", "TASK.momentum=0.9", "TASK.momentum_end=0.98")
    teacher = steps.task.teacher
    assert teacher is not None
    expected = {name: weight.clone() for name, weight in teacher.named_parameters()}
    for where in (0.0, 0.25, 0.75):
        student = {
            name: weight.detach().clone()
            for name, weight in steps.task.parts.model.named_parameters()
        }
        steps.step(where=where)
        momentum = 0.98 - 0.08 * (cos(pi * where) + 1) / 2
        for name, weight in teacher.named_parameters():
            expected[name] = momentum * expected[name] + (1 - momentum) * student[name]
            torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=1e-5)
    assert not any(weight.requires_grad for weight in teacher.parameters())
    assert not any(name.startswith("predictor") for name in expected)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("moco", {"loss.queue", "loss.place", "teacher.head.0.weight", "model.head.0.weight"}),
        ("dino", {"loss.center", "teacher.head.prototypes", "model.trunk.features.1.running_mean"}),
        (
            "swav",
            {
                "loss.queue",
                "loss.filled",
                "loss.prototypes",
                "model.trunk.features.1.num_batches_tracked",
            },
        ),
    ],
)
def test_skipped_update_changes_nothing(name: str, moves: set[str]) -> None:
    steps = Steps(
        f"experiment=digits_{name}",
        "OPTIMIZER.on_nonfinite=skip",
        *["LOSS.frozen_updates=0"][: name == "swav"],
    )
    steps.step()
    steps.step()
    before = steps.state()
    steps.step(spoil=True)
    assert changed(before, steps.state()) == set()
    steps.step()
    assert moves <= changed(before, steps.state())  # a step that is made moves them
    assert all(value.isfinite().all() for value in steps.state().values())


def test_teacher_without_the_guard_moves_in_a_skipped_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NonFiniteGuard, "protect", lambda self, lookup: None)
    steps = Steps("experiment=digits_moco", "OPTIMIZER.on_nonfinite=skip")
    steps.step()
    before = steps.state()
    steps.step(spoil=True)
    moved = changed(before, steps.state())
    assert "teacher.head.0.weight" in moved
    assert all(key.startswith("teacher.") for key in moved)


def test_only_prototypes_are_frozen_for_the_first_updates() -> None:
    steps = Steps("experiment=digits_swav", "LOSS.frozen_updates=2")
    before = steps.state()
    steps.step()
    steps.step()
    assert "loss.prototypes" not in changed(before, steps.state())
    assert "model.head.0.weight" in changed(before, steps.state())
    steps.step()
    assert "loss.prototypes" in changed(before, steps.state())


def test_test_step_changes_nothing_and_uses_the_last_temperature() -> None:
    steps = Steps("experiment=digits_dino", "LOSS.teacher_temperature=0.06")
    steps.step(where=0.0)
    before = steps.state()
    task, phase = steps.task, steps.test
    task.begin(phase, fresh=True)
    out = task.test_step(
        next(iter(task.batches(phase, 0))), Position("test", 1, 0, 0.1, 16), StepEvents()
    )
    assert changed(before, steps.state()) == set()
    assert task.parts.loss.teacher_temperature == pytest.approx(0.06)
    assert out.loss.isfinite()


@pytest.mark.feature("hooks.on_output")
def test_hook_replaces_the_embeddings_before_the_loss() -> None:
    def collapse(batch: Batch, embeddings: list[Tensor]) -> list[Tensor]:
        assert [tuple(one.shape) for one in embeddings] == [(16, 32), (16, 32)]
        return [one * 0 + 1 for one in embeddings]

    out = Steps("experiment=digits_simclr").step(events=StepEvents({"on_output": [collapse]}))
    assert float(out.logs["embedding_std"]) == 0.0


def test_standard_deviation_of_embeddings_is_logged() -> None:
    out = Steps("experiment=digits_simclr").step()
    assert 0.3 < float(out.logs["embedding_std"]) <= 1
    assert float(spread(torch.ones(5, 3))) == pytest.approx(0, abs=1e-6)
    assert (
        float(
            spread(
                torch.eye(4).repeat(2, 1) * torch.tensor([[1.0], [-1.0]]).repeat_interleave(4, 0)
            )
        )
        == 1
    )
    assert spread(torch.ones(1, 3)).isnan()


def test_padding_of_a_test_batch_does_not_count() -> None:
    steps = Steps("experiment=digits_simclr")
    task = steps.task
    task.begin(steps.test, fresh=True)
    (batch,) = next(iter(task.batches(steps.test, 0)))
    mask = torch.tensor([True] * 10 + [False] * 6)
    cut = Batch([view[:10] for view in batch.input], None, batch.ids[:10], 10)
    padded = Batch(batch.input, None, batch.ids[:10], 10, mask)
    torch.testing.assert_close(task.forward(padded).loss, task.forward(cut).loss)
    nothing = task.forward(
        Batch(batch.input, None, batch.ids[:0], 0, torch.zeros(16, dtype=torch.bool))
    )
    assert (nothing.loss.item(), nothing.weight) == (0, 0)


ONE_VIEW = "[{name: noise, std: 0.1}]"
OF_ONE = "[{name: multi_crop, groups: [{views: 1, transforms: []}]}]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["experiment=digits_moco", "TASK.momentum=null"],
            "TASK.momentum = null:",
        ),
        (
            ["experiment=digits_simclr", "TASK.momentum=0.9"],
            r"TASK\.momentum = 0\.9: .*SimCLR",
        ),
        (
            ["experiment=digits_moco", "TASK.momentum=1.5"],
            r"TASK.momentum = 1.5:",
        ),
        (
            ["experiment=digits_moco", "TASK.teacher={name: mlp, weights: a.pt}"],
            r"TASK.momentum = 0.99 and TASK.teacher",
        ),
        (
            ["experiment=digits_byol", "TASK.teacher_views=0"],
            "TASK.teacher_views = 0:",
        ),
        (
            ["experiment=digits_byol", "TASK.teacher_views=3"],
            r"teacher_views = 3: .*DATA\.TRAIN\.transforms .*2 views",
        ),
        (
            ["experiment=digits_byol", "DISTRIBUTED.reduction=ordered"],
            r"DISTRIBUTED\.reduction = 'ordered'",
        ),
        (
            ["experiment=digits_simclr", f"DATA.TEST.transforms={ONE_VIEW}"],
            r"DATA\.TEST\.transforms ",
        ),
        (
            ["experiment=digits_simclr", f"DATA.TRAIN.transforms={OF_ONE}"],
            "multi_crop .*1 view",
        ),
        (
            ["experiment=digits_simclr", "METERS.accuracy={}"],
            r"METERS\.accuracy ",
        ),
        (
            ["experiment=digits_simclr", "DATA.TRAIN.batch_transforms=[mixup]"],
            r"DATA\.TRAIN\.batch_transforms",
        ),
        (["experiment=digits_moco", "LOSS.queue=8"], "queue = 8: .* 16"),
    ],
)
def test_bad_settings_are_rejected_before_training(
    words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_run([*SMALL, *words, f"RUN.dir={tmp_path}"])


def test_model_that_takes_no_views_is_rejected() -> None:
    steps = Steps("experiment=digits_simclr", "MODEL.name=mlp")
    with raises(ConfigError, key="MODEL"):
        steps.step()
