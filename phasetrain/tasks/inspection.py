"""The size and the cost of a model: parameters, activations, floating-point operations, memory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from phasetrain.distributed.dtensors import local_shard
from phasetrain.tasks import Parts

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


def memory_estimate(parts: Parts, inspection: Inspection | None = None) -> dict[str, int | None]:
    """Return the bytes that a training needs on the device of one rank, by purpose.

    Activations are included if a micro-batch was inspected; workspace of kernels is not.
    """
    trained = [local_shard(p) for p in parts.model.parameters() if p.requires_grad]
    trained += [local_shard(p) for p in parts.loss.parameters() if p.requires_grad]
    gradients = sum(map(count_bytes, trained))
    weights = sum(
        count_bytes(local_shard(t)) for t in (*parts.model.parameters(), *parts.model.buffers())
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
                total += sum(count_bytes(local_shard(tensor)) for tensor in held)
                continue
            each = 2 if "betas" in group else int(group.get("momentum", 1.0) != 0)
            total += each * count_bytes(local_shard(parameter))
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


def _count_parameters(module: nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _depth(row: ModuleRow) -> int:
    if row.name:
        return row.name.count(".") + 1
    return 0


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes of the entries of a tensor."""
    return tensor.numel() * tensor.element_size()
