"""Sparse gradients, which hold only some rows, as `nn.Embedding(sparse=True)` makes them."""

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.errors import ConfigError
from phasetrain.optim.groups import Group
from phasetrain.runtime.format import join_first

TAKE_SPARSE = frozenset({"SGD", "Adagrad", "SparseAdam"})
"""Optimizers of torch whose unfused kernels accept sparse gradients."""


def find_sparse_weights(*modules: nn.Module) -> list[Tensor]:
    """Return the trained weights of embeddings whose gradients are sparse."""
    weights: dict[int, Tensor] = {}
    for module in modules:
        for part in module.modules():
            if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
                continue
            if part.sparse and part.weight.requires_grad:
                # By identity: tied embeddings share a weight, and it must be listed once.
                weights[id(part.weight)] = part.weight
    return list(weights.values())


def coalesce_gradients(weights: Iterable[Tensor]) -> None:
    """Add up rows that occur more than once in the sparse gradients of some weights."""
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            # Rows that occur twice would be squared separately in the norm.
            weight.grad = weight.grad.coalesce()


def dense_views(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors whose dense gradients share memory with the gradients of the weights.

    Sparse gradients must be coalesced. Clipping the views clips the gradients themselves.
    """
    return [_as_dense(weight) for weight in weights if weight.grad is not None]


def _as_dense(weight: Tensor) -> Tensor:
    grad = weight.grad
    if grad is None or not grad.is_sparse:
        return weight
    values = grad.values()
    view = values.detach()
    # A stand-in for the weight: torch's clipping functions take parameters and change `.grad` in
    # place, here the memory of the sparse values.
    view.grad = values
    return view


def check_sparse(
    optimizer: Optimizer, groups: Iterable[Group], sparse: Collection[int], where: str
) -> None:
    """Reject sparse gradients for an optimizer of torch that does not support them.

    Args:
        optimizer: optimizer over the groups.
        groups: its weights.
        sparse: `id` of each parameter whose gradients are sparse.
        where: config path of the optimizer, for messages.

    Raises:
        ConfigError: the optimizer cannot use gradients of this kind; the weights are named.
    """
    class_name = type(optimizer).__name__
    # Custom optimizers may support sparse gradients; their own error says if they do not.
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    weights = [weight for group in groups for weight in group.weights]
    rows = [weight.name for weight in weights if id(weight.parameter) in sparse]
    dense = [weight.name for weight in weights if id(weight.parameter) not in sparse]
    if class_name == "SparseAdam" and dense:
        raise ConfigError(
            f"{where}.name = 'SparseAdam': this optimizer takes sparse gradients only, and the "
            f"gradients of {join_first(dense, 3)} are dense; assign these weights to another "
            "optimizer with OPTIMIZER.others, or make their embedding sparse",
            code="config.conflict",
        )
    if not rows:
        return
    if class_name not in TAKE_SPARSE:
        raise ConfigError(
            f"{where}.name: {class_name} does not take sparse gradients, and the gradients of "
            f"{join_first(rows, 3)} are sparse; assign these weights to SparseAdam, as in "
            "OPTIMIZER.others={rows: {name: SparseAdam, match: "
            f"{rows[0]!r}}}}}, or use an embedding without sparse=True",
            code="config.conflict",
        )
    if any(group.get("momentum") for group in optimizer.param_groups):
        raise ConfigError(
            f"{where}.momentum: the gradients of {join_first(rows, 3)} are sparse, and so would be "
            "their momentum buffers, which would grow with each update; assign these weights to "
            "SparseAdam with OPTIMIZER.others, or set their momentum to 0",
            code="config.conflict",
        )
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ConfigError(
            f"{where}.weight_decay: the gradients of {join_first(rows, 3)} are sparse, and a decay "
            "of all rows would make them dense; assign these weights to SparseAdam with "
            "OPTIMIZER.others, or set their weight_decay to 0",
            code="config.conflict",
        )
