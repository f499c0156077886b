"""Updates that are not finite are described."""

import math

import pytest
import torch

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.optim.update.nonfinite import GuardSettings, NonFinite, format_error
from phasetrain.tasks import Position


class TestNonFinite:
    def test_report_is_formatted(self) -> None:
        found = NonFinite(math.nan, ("fc.weight", "fc.bias"), 1, updates=12, ids=(5, 1, 7, 2, 9, 4))
        assert str(found) == (
            "update 12 is not finite (loss nan; gradients of fc.weight, fc.bias; samples 5, 1, 7, 2, 9 and 1 more)"
        )

    @pytest.mark.parametrize(
        ("loss", "gradients", "words"),
        [
            (
                2.0,
                (),
                "an update is not finite (loss 2.0; every gradient is finite, but their norm is not)",
            ),
            (math.inf, (), "an update is not finite (loss inf; every gradient is finite)"),
            (math.inf, None, "an update is not finite (loss inf; its gradients were not saved)"),
        ],
    )
    def test_report_without_names_is_formatted(
        self, loss: float, gradients: tuple[str, ...] | None, words: str
    ) -> None:
        assert str(NonFinite(loss, gradients, 1)) == words

    def test_samples_that_are_not_finite_are_named(self) -> None:
        found = NonFinite(math.nan, (), 1, ids=(5, 1, 7), bad_inputs=(1, 7), bad_targets=(5,))
        assert str(found).endswith(
            "; samples 5, 1, 7; the input has NaN or infinite values in 2 of 3 samples: 1, 7; "
            "the target has NaN or infinite values in 1 of 3 samples: 5)"
        )

    @pytest.mark.parametrize(
        ("size", "weight", "named"), [(2, 0.0, 1), (2, 0.5, 0), (2, None, 0), (0, 0.0, 0)]
    )
    def test_micro_batch_without_weight_is_named(
        self, size: int, weight: float | None, named: int
    ) -> None:
        found = NonFinite(math.nan, (), 1)
        empty = Batch(torch.ones(2), torch.ones(2), torch.arange(2), size, weight=weight)
        other = Batch(torch.ones(2), torch.ones(2), torch.arange(2), 2, weight=1.0)
        found.locate([other, empty], Position("train", updates=0, step=0, where=0.0), World())
        assert format_error(found, GuardSettings()).count("`weight_of`") == named
