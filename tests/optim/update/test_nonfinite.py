"""What is not finite is seen whatever the tensors are like, and skipped updates are counted, told
and bounded."""

import logging
import math

import pytest
import torch
from torch import Tensor

from phasetrain.errors import NumericsError
from phasetrain.optim.update.nonfinite import (
    Buffers,
    FiniteCheck,
    Guard,
    GuardSettings,
    NonFinite,
    Pending,
    nobody,
    not_finite,
)

CPU = torch.device("cpu")
BAD = [math.nan, math.inf, -math.inf]


def good(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor([[1.5, -0.0], [2.0, -3.0]], dtype=dtype), torch.tensor(0.5, dtype=dtype)]


def sparse(value: float) -> Tensor:
    return torch.sparse_coo_tensor([[0, 2]], [1.0, value], (4,), check_invariants=True)


class TestFiniteCheck:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("bad", BAD)
    def test_one_entry_is_enough(self, dtype: torch.dtype, bad: float) -> None:
        check, tensors = FiniteCheck(CPU), good(dtype)
        assert check.finite(tensors)
        tensors[0][1, 0] = bad
        assert not check.finite(tensors)
        assert check.finite(good(dtype))  # the flag was lowered again

    def test_it_changes_no_bit(self) -> None:
        tensors = [torch.tensor([-0.0, 1e-42, 1.1, 3e38])]  # 1e-42 is denormal
        before = tensors[0].view(torch.int32).tolist()
        assert FiniteCheck(CPU).finite(tensors)
        assert tensors[0].view(torch.int32).tolist() == before

    def test_entries_whose_squares_overflow_are_finite(self) -> None:
        tensors = [torch.tensor([1e30, -1e30])]
        assert FiniteCheck(CPU).finite(tensors)
        assert not torch.nn.utils.get_total_norm(tensors).isfinite()

    def test_the_flag_is_exactly_one_and_stays_until_it_is_lowered(self) -> None:
        check = FiniteCheck(CPU)
        bad = [torch.tensor([math.nan, math.inf]), torch.tensor(math.inf)]
        assert check.mark(bad).item() == 1.0
        assert check.mark(good()).item() == 1.0
        check.reset()
        assert check.mark(good()).item() == 0.0

    @pytest.mark.parametrize(("elsewhere", "finite"), [(0.0, True), (1.0, False)])
    def test_what_another_process_has_seen_counts(self, elsewhere: float, finite: bool) -> None:
        def any_process(flag: Tensor) -> Tensor:
            return flag.fill_(max(flag.item(), elsewhere))

        check = FiniteCheck(CPU, any_process)
        assert check.finite(good()) is finite
        assert check.mark(good()).item() == 0.0  # lowered again, and nobody else was asked
        assert not check.finite([torch.tensor(math.nan)])

    def test_nothing_is_finite(self) -> None:
        assert FiniteCheck(CPU).finite([])

    @pytest.mark.parametrize("bad", BAD)
    def test_several_types(self, bad: float) -> None:
        check = FiniteCheck(CPU)
        tensors = [*good(), *good(torch.bfloat16), *good(torch.float64)]
        assert check.finite(tensors)
        tensors[2][0, 0] = bad
        assert not check.finite(tensors)

    @pytest.mark.parametrize("bad", BAD)
    def test_sparse_gradients(self, bad: float) -> None:
        check = FiniteCheck(CPU)
        assert check.finite([*good(), sparse(2.0)])
        assert not check.finite([*good(), sparse(bad)])
        assert not check.finite([torch.tensor(bad), sparse(2.0)])
        assert check.finite([*good(), sparse(2.0)])

    def test_a_torch_without_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
        check = FiniteCheck(CPU)
        assert check.finite(good())
        assert not check.finite([*good(), torch.tensor(math.nan)])
        assert check.finite(good())

    def test_what_no_way_can_look_at_is_an_error(self) -> None:
        with pytest.raises(RuntimeError):
            FiniteCheck(CPU).finite([torch.tensor([1], dtype=torch.int64)])

    def test_not_finite(self) -> None:
        assert [not_finite(t) for t in (torch.ones(2), torch.tensor(math.inf), sparse(1.0), sparse(math.nan))] == [
            False, True, False, True,
        ]  # fmt: skip


class TestNonFinite:
    def test_as_words(self) -> None:
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
                "an update is not finite (loss 2.0; every gradient finite, their norm is not)",
            ),
            (math.inf, (), "an update is not finite (loss inf; every gradient finite)"),
            (math.inf, None, "an update is not finite (loss inf; its gradients were not kept)"),
        ],
    )
    def test_without_names(
        self, loss: float, gradients: tuple[str, ...] | None, words: str
    ) -> None:
        assert str(NonFinite(loss, gradients, 1)) == words


class TestGuard:
    def test_stop(self) -> None:
        told: list[NonFinite] = []

        def tell(found: NonFinite) -> None:
            found.updates, found.ids, found.dump = 12, (3, 4), "run/numerics/u00000012"
            told.append(found)

        guard = Guard(GuardSettings())
        with pytest.raises(NumericsError) as caught:
            guard.skip(math.nan, ("weight",), tell)
        assert str(caught.value) == (
            "OPTIMIZER.on_nonfinite = 'stop': update 12 is not finite (loss nan; gradients of weight; samples 3, 4), "
            "and the weights are as they were before it; the step is kept in run/numerics/u00000012; look at it with "
            "RUN.engine=replay RUN.step=12. To leave such updates out, set OPTIMIZER.on_nonfinite=skip and "
            "RUN.allow=[OPTIMIZER.on_nonfinite]"
        )
        assert caught.value.exit_code == 1
        assert [found.stops for found in told] == [True]
        assert (guard.skipped, guard.in_row) == (0, 0)  # the update is not complete

    @pytest.mark.parametrize("budget", [0, 2])
    def test_the_budget_is_of_updates_in_a_row(self, budget: int) -> None:
        guard = Guard(GuardSettings("skip", skip_budget=budget))
        for _ in range(budget):
            guard.skip(math.inf, (), nobody)
        guard.in_row = 0  # one was made
        for _ in range(budget):
            guard.skip(math.inf, (), nobody)
        with pytest.raises(
            NumericsError,
            match=rf"^OPTIMIZER\.skip_budget = {budget}: {budget + 1} updates in a row",
        ):
            guard.skip(math.inf, (), nobody)
        assert guard.skipped == 2 * budget

    def test_a_scaler_may_skip_where_the_guard_would_stop_until_the_budget_is_spent(self) -> None:
        guard = Guard(GuardSettings("stop", skip_budget=2))
        guard.skip(1.0, None, nobody, scale=4.0)
        guard.skip(1.0, None, nobody, scale=2.0)
        with pytest.raises(
            NumericsError,
            match="3 updates in a row were skipped, and the gradient scale has come down",
        ):
            guard.skip(1.0, None, nobody, scale=1.0)

    def test_warnings_do_not_flood(self, caplog: pytest.LogCaptureFixture) -> None:
        guard = Guard(GuardSettings("skip", skip_budget=1000))
        with caplog.at_level(logging.WARNING, "phasetrain"):
            for _ in range(250):
                guard.skip(math.nan, ("weight",), nobody)
        start = "an update is not finite (loss nan; gradients of weight): skipped; in a row"
        assert [record.message for record in caplog.records] == [
            f"{start} {n}, in all {n}" for n in (1, 2, 3, 100, 200)
        ]

    def test_a_pending_verdict(self) -> None:
        guard = Guard(GuardSettings("skip"))
        guard.wait_for(torch.tensor(0.0), torch.tensor(1.5), nobody)
        guard.resolve()
        assert (guard.skipped, guard.in_row) == (0, 0)
        told: list[NonFinite] = []
        guard.wait_for(torch.tensor(1.0), torch.tensor(math.nan), told.append)
        assert told == []
        guard.resolve()
        guard.resolve()  # nothing is pending
        assert (guard.skipped, guard.in_row, len(told), told[0].gradients) == (1, 1, 1, None)

    def test_a_verdict_that_stops_stands(self) -> None:
        guard = Guard(GuardSettings("stop"))
        guard.wait_for(torch.tensor(1.0), torch.tensor(math.nan), nobody)
        for _ in range(2):  # the position is past the update, so nothing may be saved from here on
            with pytest.raises(NumericsError):
                guard.resolve()
        guard.restart(0, 0)
        guard.resolve()


def test_pending_reads_flag_loss_and_scale() -> None:
    flag, loss = torch.tensor(1.0), torch.tensor(2.5, requires_grad=True)
    assert Pending(flag, loss, nobody, torch.tensor(8.0)).read() == (True, 2.5, 8.0)
    pending = Pending(flag, loss, nobody, None)
    flag.zero_()  # the flag is used again for the next update
    assert pending.read() == (True, 2.5, None)
    assert Pending(torch.tensor(False), loss, nobody, None).read() == (False, 2.5, None)


class TestBuffers:
    def test_kept_and_restored(self) -> None:
        mean, count = torch.tensor([1.0, 2.0]), torch.tensor(3)
        buffers = Buffers(lambda: [mean, count])
        mean.fill_(5.0)
        buffers.keep()
        mean.fill_(math.nan)
        count += 1
        buffers.restore()
        assert (mean.tolist(), count.item()) == ([5.0, 5.0], 3)

    def test_restored_by_a_flag(self) -> None:
        mean = torch.tensor([1.0, 2.0])
        buffers = Buffers(lambda: [mean])
        buffers.keep()
        mean.fill_(math.nan)
        buffers.restore_where(torch.tensor(1.0))
        assert mean.tolist() == [1.0, 2.0]
        mean.fill_(7.0)
        buffers.restore_where(torch.tensor(0.0))
        assert mean.tolist() == [7.0, 7.0]

    def test_a_tensor_put_in_place_of_another(self) -> None:
        now = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
        buffers = Buffers(lambda: now)
        buffers.keep()
        now[0] = torch.full((2,), math.nan)
        now[1] = torch.full((4,), math.nan)  # of another shape even
        buffers.restore()
        assert [tensor.tolist() for tensor in now] == [[1.0, 2.0], 3.0]
