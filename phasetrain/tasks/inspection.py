"""The size and the cost of a model: parameters, activations, floating-point operations, memory."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from phasetrain.distributed.dtensors import local_shard
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.runtime.format import join_first
from phasetrain.runtime.nested import list_tensors
from phasetrain.tasks import Parts, Task
from phasetrain.tasks.shape_errors import check_step_output

log = logging.getLogger(__name__)

SHOWN_UNUSED = 3
"""Maximum number of names of parameters without a gradient."""

ROWS = 30
"""Maximum number of modules that are shown; a larger model is shown to a smaller depth."""


@dataclass(frozen=True)
class ModuleRow:
    """One module of a model, including its submodules.

    Attributes:
        name: name of the module; empty for the model.
        kind: its class.
        parameters: number of scalars, trained or not.
        trained: number of scalars that require a gradient.
        output: shape of its last output, with N for the samples of a micro-batch; None if it
            was not called.
        output_bytes: bytes of its outputs for a micro-batch.
        flops: floating-point operations of a forward pass per sample; None if not
            counted.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    output: str | None = None
    output_bytes: int = 0
    flops: int | None = None


@dataclass(frozen=True)
class Inspection:
    """Figures measured with one micro-batch of the training.

    Attributes:
        modules: modules of the model in order, the model itself first.
        samples: number of samples of the micro-batch.
        forward_flops: floating-point operations per sample of the whole task, loss included; None:
            not counted.
        train_flops: the same with the backward pass.
        activation_bytes: outputs of the modules without others below them, and the input, for a
            micro-batch.
    """

    modules: tuple[ModuleRow, ...]
    samples: int
    forward_flops: int | None
    train_flops: int | None
    activation_bytes: int

    def plain(self) -> dict[str, Any]:
        """Return the inspection as JSON data."""
        return asdict(self) | {"modules": [asdict(row) for row in self.modules]}


def modules_of(model: nn.Module) -> list[ModuleRow]:
    """Return a row for each module, without the figures that need a batch."""
    return [
        ModuleRow(name, type(module).__name__, *_count_parameters(module))
        for name, module in model.named_modules()
        if not name
        or type(module).forward is not nn.Module.forward
        or next(module.parameters(), None) is not None
    ]


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


def memory_estimate(parts: Parts, inspection: Inspection | None = None) -> dict[str, int | None]:
    """Return the bytes that a training needs on the device of one rank, by purpose.

    Activations are included if a micro-batch was inspected; workspace of kernels is not.
    """
    trained = [local_shard(p) for p in parts.model.parameters() if p.requires_grad]
    trained += [local_shard(p) for p in parts.loss.parameters() if p.requires_grad]
    gradients = sum(map(_size, trained))
    weights = sum(
        _size(local_shard(t)) for t in (*parts.model.parameters(), *parts.model.buffers())
    )
    sizes: dict[str, int | None] = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer_bytes(parts),
        "averages": weights * len(parts.averages),
        "activations": None if inspection is None else inspection.activation_bytes,
    }
    return sizes | {"total": sum(size or 0 for size in sizes.values())}


def optimizer_bytes(parts: Parts) -> int:
    """Return the approximate bytes of optimizer state on this rank: the present state, or one or
    two values per weight before the first step.

    Two values per weight with `betas`, none with a momentum of 0, otherwise one.
    """
    if parts.updater is None:
        return 0
    optimizer = parts.updater.optimizer
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Measured if the optimizer has stepped; else estimated from its options before the
            # first step.
            weight_state = optimizer.state.get(parameter)
            held = [state for state in (weight_state or {}).values() if isinstance(state, Tensor)]
            if held:
                total += sum(_size(local_shard(tensor)) for tensor in held)
                continue
            each = 2 if "betas" in group else int(group.get("momentum", 1.0) != 0)
            total += each * _size(local_shard(parameter))
    return total


def checkpoint_bytes(parts: Parts) -> int:
    """Return the approximate size of a checkpoint: weights, averages and optimizer state."""
    models = 1 + len(parts.averages)
    weights: int = models * sum(
        t.numel() * t.element_size() for t in parts.model.state_dict().values()
    )
    kept: int = 0
    if parts.updater is not None:
        per_weight = 2 if "betas" in parts.updater.optimizer.defaults else 1
        kept = per_weight * sum(
            p.numel() * p.element_size() for p in parts.updater.gradients.parameters
        )
    return weights + kept


def shown_modules(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Return the rows down to the largest depth with at most `ROWS` rows."""
    depth = max((row.name.count(".") + 1 for row in rows if row.name), default=0)
    while depth > 1 and sum(_depth(row) <= depth for row in rows) > ROWS:
        depth -= 1
    shallow = [row for row in rows if _depth(row) <= depth]
    if len(shallow) <= ROWS:
        return shallow
    return shallow[:ROWS]


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
            self.bytes_of[name] = self.bytes_of.get(name, 0) + sum(map(_size, tensors))

        return hook


def _count_parameters(module: nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _depth(row: ModuleRow) -> int:
    if row.name:
        return row.name.count(".") + 1
    return 0


def _format_shape(shape: Sequence[int], samples: int) -> str:
    words = [str(size) for size in shape]
    if shape and shape[0] == samples:
        words[0] = "N"
    if len(words) == 1:
        return f"({words[0]},)"
    return f"({', '.join(words)})"


def _bytes(value: Any) -> int:
    return sum(map(_size, list_tensors(value)))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
