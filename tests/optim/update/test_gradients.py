"""Infinities and NaNs are found in tensors of any dtype, layout and rank."""

import math

import pytest
import torch
from torch import Tensor

from phasetrain.optim.update.gradients import FiniteCheck, has_nonfinite

CPU = torch.device("cpu")
BAD = [math.nan, math.inf, -math.inf]


def good(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor([[1.5, -0.0], [2.0, -3.0]], dtype=dtype), torch.tensor(0.5, dtype=dtype)]


def sparse(value: float) -> Tensor:
    return torch.sparse_coo_tensor([[0, 2]], [1.0, value], (4,), check_invariants=True)


class TestFiniteCheck:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("bad", BAD)
    def test_one_nonfinite_entry_is_found(self, dtype: torch.dtype, bad: float) -> None:
        check, tensors = FiniteCheck(CPU), good(dtype)
        assert check.all_finite(tensors)
        tensors[0][1, 0] = bad
        assert not check.all_finite(tensors)
        assert check.all_finite(good(dtype))  # the flag was lowered again

    def test_check_does_not_change_the_gradients(self) -> None:
        tensors = [torch.tensor([-0.0, 1e-42, 1.1, 3e38])]  # 1e-42 is denormal
        before = tensors[0].view(torch.int32).tolist()
        assert FiniteCheck(CPU).all_finite(tensors)
        assert tensors[0].view(torch.int32).tolist() == before

    def test_large_entries_are_finite(self) -> None:
        tensors = [torch.tensor([1e30, -1e30])]
        assert FiniteCheck(CPU).all_finite(tensors)
        assert not torch.nn.utils.get_total_norm(tensors).isfinite()

    def test_flag_is_1_until_it_is_reset(self) -> None:
        check = FiniteCheck(CPU)
        bad = [torch.tensor([math.nan, math.inf]), torch.tensor(math.inf)]
        assert check.mark(bad).item() == 1.0
        assert check.mark(good()).item() == 1.0
        check.reset()
        assert check.mark(good()).item() == 0.0

    @pytest.mark.parametrize(("elsewhere", "finite"), [(0.0, True), (1.0, False)])
    def test_flag_of_another_rank_counts(self, elsewhere: float, finite: bool) -> None:
        def any_rank(flag: Tensor) -> Tensor:
            return flag.fill_(max(flag.item(), elsewhere))

        check = FiniteCheck(CPU, any_rank)
        assert check.all_finite(good()) is finite
        assert check.mark(good()).item() == 0.0  # lowered again, and nobody else was asked
        assert not check.all_finite([torch.tensor(math.nan)])

    def test_empty_list_is_finite(self) -> None:
        assert FiniteCheck(CPU).all_finite([])

    @pytest.mark.parametrize("bad", BAD)
    def test_several_dtypes_are_checked(self, bad: float) -> None:
        check = FiniteCheck(CPU)
        tensors = [*good(), *good(torch.bfloat16), *good(torch.float64)]
        assert check.all_finite(tensors)
        tensors[2][0, 0] = bad
        assert not check.all_finite(tensors)

    @pytest.mark.parametrize("bad", BAD)
    def test_sparse_gradients_are_checked(self, bad: float) -> None:
        check = FiniteCheck(CPU)
        assert check.all_finite([*good(), sparse(2.0)])
        assert not check.all_finite([*good(), sparse(bad)])
        assert not check.all_finite([torch.tensor(bad), sparse(2.0)])
        assert check.all_finite([*good(), sparse(2.0)])

    def test_check_works_without_the_fused_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
        check = FiniteCheck(CPU)
        assert check.all_finite(good())
        assert not check.all_finite([*good(), torch.tensor(math.nan)])
        assert check.all_finite(good())

    def test_exhausted_memory_is_raised_and_keeps_the_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def exhaust(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        check = FiniteCheck(CPU)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", exhaust)
            with pytest.raises(torch.OutOfMemoryError):
                check.all_finite(good())
        assert check.all_finite([torch.tensor([1e30, -1e30])])  # their norm is infinite

    def test_unsupported_dtype_is_an_error(self) -> None:
        with pytest.raises(RuntimeError):
            FiniteCheck(CPU).all_finite([torch.tensor([1], dtype=torch.int64)])

    def test_has_nonfinite_checks_a_single_tensor(self) -> None:
        assert [has_nonfinite(t) for t in (torch.ones(2), torch.tensor(math.inf), sparse(1.0), sparse(math.nan))] == [
            False, True, False, True,
        ]  # fmt: skip
