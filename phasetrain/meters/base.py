"""What a meter is, and the registry of meters (section METERS)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from phasetrain.batch import StepOutput
from phasetrain.registry import Registry


class Meter(nn.Module, ABC):
    """A metric that accumulates over a phase in summed buffers.

    Its state is its buffers and nothing else: `state_dict` holds a half-finished phase, and the sum of the
    buffers of all processes is the state of the whole. `update` runs in every step and must not wait for the
    device: no `.item()`, no branch on a tensor's value. In training, outputs carry a graph; what is added is detached.

    Sums are float64 by default, which the MPS device does not have; a meter for it asks for float32.

    Example:
        >>> class MeanOutput(Meter):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.add_sum("total")
        ...         self.add_sum("count", dtype=torch.int64)
        ...     def update(self, out: StepOutput) -> None:
        ...         self.total += out.output.detach().sum()
        ...         self.count += out.output.numel()
        ...     def compute(self) -> float:
        ...         return float(self.total / self.count)
    """

    def add_sum(self, name: str, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> None:
        """Add the buffer `name`, zeros of `shape`, to which `update` adds and which is summed over processes."""
        self.register_buffer(name, torch.zeros(tuple(shape), dtype=dtype))

    @abstractmethod
    def update(self, out: StepOutput) -> None:
        """Add what one step produced; samples whose `out.mask` is False do not count."""

    @abstractmethod
    def compute(self) -> float | dict[str, float]:
        """Return the metric of what was added so far (or several by name); NaN when nothing was."""

    def reset(self) -> None:
        """Set all sums to zero."""
        for buffer in self.buffers():
            buffer.zero_()


METERS: Registry[Meter] = Registry("meter", "METERS")
