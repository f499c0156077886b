"""Errors of regression."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from phasetrain.engine.batch import StepOutput
from phasetrain.meters.base import METERS, Better, Meter


@METERS.register("regression")
class Regression(Meter):
    """Mean squared error, its root, mean absolute error and R2 of numbers, `mse`, `rmse`, `mae` and
    `r2`.

    Takes outputs and targets of the same shape `(N,)` or `(N, ...)`; `(N, 1)` and `(N,)` fit too.
    Every sample counts the same. The numbers of a sample are columns: `mse`, `mae` and `r2` are
    means over columns, weighted by `weights`, and `rmse` is the root of `mse`. `r2` of a column is
    1 - sum((y - output)^2) / sum((y - mean(y))^2), NaN where the targets are all the same.

    Args:
        weights: weight of each column, at least 0; by default all the same.

    Raises:
        ValueError: weights below 0, or all 0; on update: other shapes, or another number of columns
            than of weights.
    """

    better = "smaller"
    first = "mse"

    seen: Tensor

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if weights is not None and (not weights or min(weights) < 0 or sum(weights) <= 0):
            raise ValueError(
                f"weights = {list(weights)}: expected one of at least 0 for each column, not all 0"
            )
        self.weights = weights
        self.add_rows("seen", dtype=torch.float64)  # one row (5, columns) per process, see _sums

    def update(self, out: StepOutput) -> None:
        """Add errors and targets of one step; squares are summed about the mean, so that large
        targets lose nothing."""
        output, target = self._columns(out)
        mask = torch.ones(len(target), 1, dtype=torch.bool, device=target.device)
        step = _sums(output, target, mask if out.mask is None else out.mask[:, None])
        if len(self.seen):
            self.seen[-1] = _together(self.seen[-1], step)
        else:
            self.keep("seen", step[None])

    def direction(self, metric: str = "") -> Better | None:
        """Return which values are better: larger ones of `r2`, smaller ones of the others."""
        if metric == "r2":
            return "larger"
        return self.better

    def compute(self) -> dict[str, float]:
        """Return all errors, NaN without samples."""
        if not len(self.seen):
            return dict.fromkeys(("mse", "rmse", "mae", "r2"), float("nan"))
        samples, absolute, squared, _, spread = reduce(_together, self.seen.cpu())
        if self.weights is None:
            weights = torch.ones_like(samples)
        else:
            weights = torch.tensor(self.weights, dtype=torch.float64)
        weights = weights / weights.sum()
        used = weights > 0
        mse = float((squared / samples)[used] @ weights[used])
        explained = torch.where(spread > 0, 1 - squared / spread, torch.nan)
        return {
            "mse": mse,
            "rmse": mse**0.5,
            "mae": float((absolute / samples)[used] @ weights[used]),
            "r2": float(explained[used] @ weights[used]),
        }

    def _columns(self, out: StepOutput) -> tuple[Tensor, Tensor]:
        output = out.output
        target = out.target
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise ValueError(  # noqa: TRY004 - the user chose a meter that does not fit
                f"regression takes tensors of numbers, not {type(output).__name__} and {type(target).__name__}"
            )
        shapes = [
            one.shape[:-1] if one.ndim == 2 and one.shape[1] == 1 else one.shape
            for one in (output, target)
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


def _sums(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return samples, absolute and squared errors, mean of the targets and their squares about it,
    `(5, columns)`."""
    zero = target.new_zeros(())
    samples = mask.sum(0).double().expand(target.shape[1])
    error = torch.where(mask, output - target, zero)
    mean = torch.where(mask, target, zero).sum(0) / samples.clamp(min=1)
    spread = torch.where(mask, target - mean, zero).square().sum(0)
    return torch.stack([samples, error.abs().sum(0), error.square().sum(0), mean, spread])


def _together(one: Tensor, other: Tensor) -> Tensor:
    """Return the sums of two groups of samples as of one (Chan, Golub and LeVeque 1979, Updating
    formulae, 2.1)."""
    samples = one[0] + other[0]
    share = other[0] / samples.clamp(min=1)
    apart = other[3] - one[3]
    mean = one[3] + apart * share
    spread = one[4] + other[4] + apart.square() * one[0] * share
    return torch.stack([samples, one[1] + other[1], one[2] + other[2], mean, spread])
