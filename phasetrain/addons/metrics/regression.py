"""Regression errors."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Better, Meter


@METERS.register("regression")
class Regression(Meter):
    """Mean squared error, its root, mean absolute error and R2: `mse`, `rmse`, `mae` and `r2`.

    Takes outputs and targets of the same shape `(N,)` or `(N, ...)`; `(N, 1)` and `(N,)` match too.
    Every sample counts the same. The numbers of a sample are columns: `mse`, `mae` and `r2` are
    means over columns, weighted by `weights`, and `rmse` is the root of `mse`. `r2` of a column is
    1 - sum((y - output)^2) / sum((y - mean(y))^2), NaN if all targets are equal.

    Args:
        weights: nonnegative weight of each column; equal by default.

    Raises:
        ValueError: weights are negative or all 0; on update: the shapes differ, or the number of
            columns is not the number of weights.
    """

    better: ClassVar[Mapping[str, Better]] = {
        "mse": "smaller",
        "rmse": "smaller",
        "mae": "smaller",
        "r2": "larger",
    }
    first = "mse"

    seen: Tensor

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if weights is not None and (not weights or min(weights) < 0 or sum(weights) <= 0):
            raise ValueError(
                f"weights = {list(weights)}: expected a nonnegative number per column, not all 0"
            )
        self.weights = weights
        # One row (5, columns) per rank, see _compute_sums: rows can be merged exactly, sums of
        # squares about different means cannot be added.
        self.add_rows("seen", dtype=torch.float64)

    def update(self, out: StepOutput) -> None:
        """Add the errors and targets of one step."""
        output, target = self._read_columns(out)
        if out.mask is None:
            mask = torch.ones(len(target), 1, dtype=torch.bool, device=target.device)
        else:
            mask = out.mask[:, None]
        step = _compute_sums(output, target, mask)
        # One row per rank: memory does not grow with the number of steps.
        if len(self.seen):
            self.seen[-1] = _merge_sums(self.seen[-1], step)
        else:
            self.append_rows("seen", step[None])

    def compute(self) -> dict[str, float]:
        """Return all errors, NaN without samples."""
        if not len(self.seen):
            return dict.fromkeys(("mse", "rmse", "mae", "r2"), float("nan"))
        samples, absolute, squared, _, spread = reduce(_merge_sums, self.seen.cpu())
        if self.weights is None:
            weights = torch.ones_like(samples)
        else:
            weights = torch.tensor(self.weights, dtype=torch.float64)
        weights = weights / weights.sum()
        # A column of weight 0 may be NaN, and 0 * NaN would spoil the mean.
        used = weights > 0
        mse = float((squared / samples)[used] @ weights[used])
        explained = torch.where(spread > 0, 1 - squared / spread, torch.nan)
        return {
            "mse": mse,
            "rmse": mse**0.5,
            "mae": float((absolute / samples)[used] @ weights[used]),
            "r2": float(explained[used] @ weights[used]),
        }

    def _read_columns(self, out: StepOutput) -> tuple[Tensor, Tensor]:
        output = out.output
        target = out.target
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                f"regression takes tensors, not {type(output).__name__} and {type(target).__name__}"
            )
        shapes = [
            tensor.shape[:-1] if tensor.ndim == 2 and tensor.shape[1] == 1 else tensor.shape
            for tensor in (output, target)
        ]
        if shapes[0] != shapes[1] or not shapes[0]:
            raise ValueError(
                "regression takes outputs and targets of the same shape (N, ...), not "
                f"{tuple(output.shape)} and {tuple(target.shape)}"
            )
        columns = shapes[1][1:].numel()
        if self.weights is not None and len(self.weights) != columns:
            raise ValueError(
                f"regression: {len(self.weights)} weights for {columns} columns; give one for each"
            )
        return output.detach().double().reshape(-1, columns), target.double().reshape(-1, columns)


def _compute_sums(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return count, absolute error, squared error, target mean and squared deviation from it, as
    `(5, columns)`."""
    zero = target.new_zeros(())
    samples = mask.sum(0).double().expand(target.shape[1])
    # where instead of a product with the mask, because padding may contain NaN.
    error = torch.where(mask, output - target, zero)
    mean = torch.where(mask, target, zero).sum(0) / samples.clamp(min=1)
    # About the mean, so that large targets do not cancel.
    spread = torch.where(mask, target - mean, zero).square().sum(0)
    return torch.stack([samples, error.abs().sum(0), error.square().sum(0), mean, spread])


def _merge_sums(one: Tensor, other: Tensor) -> Tensor:
    """Return the sums over two groups of samples (Chan, Golub and LeVeque 1979, Updating formulae,
    2.1)."""
    samples = one[0] + other[0]
    share = other[0] / samples.clamp(min=1)
    apart = other[3] - one[3]
    mean = one[3] + apart * share
    spread = one[4] + other[4] + apart.square() * one[0] * share
    return torch.stack([samples, one[1] + other[1], one[2] + other[2], mean, spread])
