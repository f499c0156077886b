"""Skipped updates are counted, reported and bounded, and leave buffers as they were."""

import logging
import math
import re

import pytest
import torch
from raising import raises

from phasetrain.errors import NumericsError
from phasetrain.optim.update.guard import (
    NonFiniteGuard,
    PendingVerdict,
    RestorePoint,
    ignore_skip,
)
from phasetrain.optim.update.nonfinite import CLEAN_DATA, GuardSettings, NonFinite


class TestGuard:
    @pytest.mark.parametrize("bad", [(), (4,)])
    @pytest.mark.parametrize("settings", [GuardSettings(), GuardSettings("skip", skip_budget=0)])
    def test_advice_is_to_change_the_data_where_it_is_not_finite(
        self, bad: tuple[int, ...], settings: GuardSettings
    ) -> None:
        def tell(found: NonFinite) -> None:
            found.ids, found.bad_inputs = (3, 4), bad

        with raises(NumericsError) as caught:
            NonFiniteGuard(settings).skip(math.nan, (), tell)
        assert str(caught.value).endswith(CLEAN_DATA) == bool(bad)

    def test_policy_stop_raises_with_the_report(self) -> None:
        told: list[NonFinite] = []

        def tell(found: NonFinite) -> None:
            found.updates, found.ids, found.dump = 12, (3, 4), "run/numerics/u00000012"
            told.append(found)

        guard = NonFiniteGuard(GuardSettings())
        with raises(NumericsError, key="OPTIMIZER.on_nonfinite", given="'stop'") as caught:
            guard.skip(math.nan, ("weight",), tell)
        message = str(caught.value)
        assert re.search(r"update 12 .*\(loss nan; gradients of weight; samples 3, 4\)", message)
        assert "run/numerics/u00000012" in message
        assert caught.value.exit_code == 1
        assert [found.stops for found in told] == [True]
        assert (guard.skipped, guard.in_row) == (0, 0)  # the update is not complete

    @pytest.mark.parametrize("budget", [0, 2])
    def test_budget_counts_updates_in_a_row(self, budget: int) -> None:
        guard = NonFiniteGuard(GuardSettings("skip", skip_budget=budget))
        for _ in range(budget):
            guard.skip(math.inf, (), ignore_skip)
        guard.in_row = 0  # one was made
        for _ in range(budget):
            guard.skip(math.inf, (), ignore_skip)
        with pytest.raises(
            NumericsError,
            match=rf"^OPTIMIZER\.skip_budget = {budget}: {budget + 1} ",
        ):
            guard.skip(math.inf, (), ignore_skip)
        assert guard.skipped == 2 * budget

    def test_scaler_may_skip_within_the_budget(self) -> None:
        guard = NonFiniteGuard(GuardSettings("stop", skip_budget=2))
        guard.skip(1.0, None, ignore_skip, scale=4.0)
        guard.skip(1.0, None, ignore_skip, scale=2.0)
        with raises(NumericsError, key="OPTIMIZER.skip_budget"):
            guard.skip(1.0, None, ignore_skip, scale=1.0)

    def test_warnings_are_limited(self, caplog: pytest.LogCaptureFixture) -> None:
        guard = NonFiniteGuard(GuardSettings("skip", skip_budget=1000))
        with caplog.at_level(logging.WARNING, "phasetrain"):
            for _ in range(250):
                guard.skip(math.nan, ("weight",), ignore_skip)
        start = "an update is not finite (loss nan; gradients of weight): skipped"
        assert [record.message for record in caplog.records] == [
            f"{start} ({n} in a row, {n} in total)" for n in (1, 2, 3, 100, 200)
        ]

    def test_pending_verdict_is_resolved_later(self) -> None:
        guard = NonFiniteGuard(GuardSettings("skip"))
        guard.defer(torch.tensor(0.0), torch.tensor(1.5), ignore_skip)
        guard.resolve()
        assert (guard.skipped, guard.in_row) == (0, 0)
        told: list[NonFinite] = []
        guard.defer(torch.tensor(1.0), torch.tensor(math.nan), told.append)
        assert told == []
        guard.resolve()
        guard.resolve()  # nothing is pending
        assert (guard.skipped, guard.in_row, len(told), told[0].gradients) == (1, 1, 1, None)

    def test_verdict_to_stop_is_kept(self) -> None:
        guard = NonFiniteGuard(GuardSettings("stop"))
        guard.defer(torch.tensor(1.0), torch.tensor(math.nan), ignore_skip)
        for _ in range(2):  # the position is past the update, so nothing may be saved from here on
            with pytest.raises(NumericsError):
                guard.resolve()
        guard.restart(0, 0)
        guard.resolve()


def test_pending_reads_flag_loss_and_scale() -> None:
    flag, loss = torch.tensor(1.0), torch.tensor(2.5, requires_grad=True)
    assert PendingVerdict(flag, loss, ignore_skip, torch.tensor(8.0)).read() == (True, 2.5, 8.0)
    pending = PendingVerdict(flag, loss, ignore_skip, None)
    flag.zero_()  # the flag is used again for the next update
    assert pending.read() == (True, 2.5, None)
    assert PendingVerdict(torch.tensor(False), loss, ignore_skip, None).read() == (False, 2.5, None)


class TestRestorePoint:
    def test_tensors_are_restored(self) -> None:
        mean, count = torch.tensor([1.0, 2.0]), torch.tensor(3)
        buffers = RestorePoint(lambda: [mean, count])
        mean.fill_(5.0)
        buffers.save()
        mean.fill_(math.nan)
        count += 1
        buffers.restore()
        assert (mean.tolist(), count.item()) == ([5.0, 5.0], 3)

    def test_tensors_are_restored_if_the_flag_is_set(self) -> None:
        mean = torch.tensor([1.0, 2.0])
        buffers = RestorePoint(lambda: [mean])
        buffers.save()
        mean.fill_(math.nan)
        buffers.restore_where(torch.tensor(1.0))
        assert mean.tolist() == [1.0, 2.0]
        mean.fill_(7.0)
        buffers.restore_where(torch.tensor(0.0))
        assert mean.tolist() == [7.0, 7.0]

    def test_tensors_of_any_type_and_layout_are_restored_if_the_flag_is_set(self) -> None:
        several = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        now = [
            torch.tensor([True, False]),
            torch.tensor(3),
            torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last),
            several[:, 0],  # has gaps in its memory
            torch.zeros(0),
        ]
        before = [tensor.clone() for tensor in now]
        buffers = RestorePoint(lambda: now)
        for _ in range(2):  # the second time, the memory of the copies is used again
            buffers.save()
            for tensor in now:
                tensor.zero_()
            buffers.restore_where(torch.tensor(1.0))
            assert all(map(torch.equal, now, before))
        assert several[:, 1].tolist() == [2.0, 4.0]

    def test_replaced_tensor_is_restored(self) -> None:
        now = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
        buffers = RestorePoint(lambda: now)
        buffers.save()
        now[0] = torch.full((2,), math.nan)
        now[1] = torch.full((4,), math.nan)  # of another shape even
        buffers.restore()
        assert [tensor.tolist() for tensor in now] == [[1.0, 2.0], 3.0]
