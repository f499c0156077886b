"""Measures activations and floating-point operations of a model with a micro-batch."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.runtime.format import join_first
from phasetrain.runtime.nested import list_tensors
from phasetrain.tasks import Task
from phasetrain.tasks.inspection import Inspection, ModuleRow, count_bytes, modules_of
from phasetrain.tasks.shape_errors import check_step_output

log = logging.getLogger(__name__)

SHOWN_UNUSED = 3
"""Maximum number of names of parameters without a gradient."""


def inspect(task: Task, phase: Phase, batch: Batch) -> Inspection:
    """Make one forward and backward pass of a train phase with a micro-batch, and drop the
    gradient.

    Running statistics move as in any pass: use a task that is not trained afterwards, or
    `preserve_state`.

    Args:
        task: the task; its model and loss are called without the strategy's wrapper.
        phase: a train phase.
        batch: on the task's device, with at least one sample.
    """
    from torch.utils.flop_counter import FlopCounterMode  # it imports much of torch's compiler

    task.begin(phase, fresh=False)
    # The strategy's wrapper would exchange gradients, and torch's counter does not see into
    # compiled modules.
    task.model = task.parts.model
    task.loss = task.parts.loss
    counter = FlopCounterMode(display=False)
    notes = _Notes(task.parts.model)
    with counter, notes.taken(counter.get_total_flops):
        # Only the forward pass, as in training: torch advises against a backward pass under
        # autocast.
        with task.parts.machine.autocast(train=True):
            loss = check_step_output(task, task.forward(batch)).loss
        forward = counter.get_total_flops()
        loss.backward()  # type: ignore[no-untyped-call]
        train = counter.get_total_flops()
    weights = task.parts.model.named_parameters()
    unused = [name for name, weight in weights if weight.requires_grad and weight.grad is None]
    if unused:
        log.info(
            "MODEL: the loss of the first batch does not depend on %s; several ranks need "
            "DISTRIBUTED.find_unused_parameters=true",
            join_first(unused, SHOWN_UNUSED),
        )
    task.updater.drop_gradients()
    rows = tuple(notes.row(row, batch.size) for row in modules_of(task.parts.model))
    leaves = sum(
        notes.bytes_of.get(name, 0)
        for name, module in task.parts.model.named_modules()
        if not _has_parts(module)
    )
    return Inspection(
        modules=rows,
        samples=batch.size,
        forward_flops=forward // batch.size,
        train_flops=train // batch.size,
        activation_bytes=leaves + _bytes(batch.input),
    )


class _Notes:
    """Records outputs and operation counts of modules during a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.bytes_of: dict[str, int] = {}
        self.flops: dict[str, int] = {}

    @contextmanager
    def taken(self, count: Callable[[], int]) -> Iterator[None]:
        """Record until the end of the block."""
        with ExitStack() as stack:
            for name, module in self._modules.items():
                stack.callback(module.register_forward_pre_hook(self._enter(name, count)).remove)
                stack.callback(module.register_forward_hook(self._leave(name, count)).remove)
            yield

    def row(self, row: ModuleRow, samples: int) -> ModuleRow:
        """Return a row with the records of its module."""
        if row.name not in self.shapes:
            return row
        shape = _format_shape(self.shapes[row.name], samples)
        counted = self.flops[row.name] // samples
        columns = (row.name, row.kind, row.parameters, row.trained)
        return ModuleRow(*columns, shape, self.bytes_of[row.name], counted)

    def _enter(self, name: str, count: Callable[[], int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            # The counter runs on: what it shows on leaving minus on entering is the module's share,
            # summed over several calls.
            self.flops[name] = self.flops.get(name, 0) - count()

        return hook

    def _leave(self, name: str, count: Callable[[], int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.flops[name] = self.flops.get(name, 0) + count()
            tensors = list_tensors(output)
            self.shapes[name] = tuple(tensors[-1].shape) if tensors else ()
            self.bytes_of[name] = self.bytes_of.get(name, 0) + sum(map(count_bytes, tensors))

        return hook


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _format_shape(shape: Sequence[int], samples: int) -> str:
    words = [str(size) for size in shape]
    if shape and shape[0] == samples:
        words[0] = "N"
    if len(words) == 1:
        return f"({words[0]},)"
    return f"({', '.join(words)})"


def _bytes(value: Any) -> int:
    return sum(map(count_bytes, list_tensors(value)))
