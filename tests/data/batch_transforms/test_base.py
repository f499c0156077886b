from dataclasses import replace

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.data.batch_transforms import (
    BATCH_TRANSFORMS,
    PairPipeline,
    PairTransform,
    make_soft_target,
)
from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError


def batch_of(target: torch.Tensor) -> Batch:
    return Batch(torch.zeros(len(target), 1), target, torch.arange(len(target)) + 50, len(target))


class Drawn(PairTransform):
    """Notes what it draws."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        self.drawn.append(random.random())
        return batch


def test_each_transform_has_its_own_generator_seeded_by_the_batch() -> None:
    one, other, batch = Drawn(), Drawn(), batch_of(torch.tensor([0, 1]))
    pipeline = PairPipeline([one, other])
    for seed in (7, 7, 8):
        assert pipeline(batch, seed) is batch
    assert one.drawn[0] == one.drawn[1] != one.drawn[2]
    assert one.drawn[0] != other.drawn[0] == other.drawn[1]


class Softened(PairTransform):
    """Gives the classes as probabilities."""

    def __call__(self, batch: Batch, random: np.random.Generator) -> Batch:
        return replace(batch, target=make_soft_target(batch, 2))


class TestSoftTarget:
    def test_classes_become_probabilities(self) -> None:
        found = make_soft_target(batch_of(torch.tensor([2, 0])), 3)
        assert (found.tolist(), found.dtype) == ([[0, 0, 1], [1, 0, 0]], torch.float32)

    def test_floats_are_unchanged(self) -> None:
        target = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        assert make_soft_target(batch_of(target), None) is target

    @pytest.mark.parametrize(
        ("target", "classes", "message"),
        [
            (
                torch.tensor([0, 3]),
                3,
                "sample 51 .* label 3, .* 0 to 2",
            ),
            (torch.tensor([-1, 0]), 3, "sample 50 .* label -1"),
            (
                torch.tensor([0, 1]),
                None,
                "`classes`",
            ),
            (torch.tensor([[0], [1]]), 2, r"torch.int64 .*\(2, 1\)"),
        ],
    )
    def test_targets_without_class_probabilities_are_rejected(
        self, target: torch.Tensor, classes: int | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            make_soft_target(batch_of(target), classes)

    def test_batch_without_a_target_is_rejected(self) -> None:
        with raises(ConfigError, key="DATA.TRAIN.batch_transforms[1]"):
            PairPipeline([Drawn(), Softened()])(
                Batch(torch.zeros(2, 1), None, torch.arange(2), 2), 0
            )


@pytest.mark.addon("vision")
def test_unknown_name_gets_a_suggestion() -> None:
    with raises(
        ConfigError,
        code="config.unknown_part",
        key="DATA.TRAIN.batch_transforms.name",
        suggestion="cutmix",
    ):
        BATCH_TRANSFORMS.build("cut_mix", {})
