"""Gradients of which only some rows are there, as those of `nn.Embedding(sparse=True)`."""

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.errors import ConfigError
from phasetrain.optim.groups import Group
from phasetrain.runtime.format import join_first

TAKE_SPARSE = frozenset({"SGD", "Adagrad", "SparseAdam"})
"""Optimizers of torch that take sparse gradients, without their fused kernels."""


def sparse_weights(*modules: nn.Module) -> list[Tensor]:
    """Return the trained weights of embeddings whose gradients have the rows of a batch alone."""
    found = {}
    for part in (part for module in modules for part in module.modules()):
        if (
            isinstance(part, nn.Embedding | nn.EmbeddingBag)
            and part.sparse
            and part.weight.requires_grad
        ):
            found[id(part.weight)] = part.weight
    return list(found.values())


def coalesce(weights: Iterable[Tensor]) -> None:
    """Add up the rows that stand more than once in the gradients of some weights."""
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.coalesce()


def holders(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors whose gradients are dense and share memory with those of the weights, which
    are coalesced."""
    return [_holder(weight) for weight in weights if weight.grad is not None]


def _holder(weight: Tensor) -> Tensor:
    grad = weight.grad
    if grad is None or not grad.is_sparse:
        return weight
    values = grad.values()
    holder = values.detach()
    holder.grad = values
    return holder


def check_sparse(
    optimizer: Optimizer, groups: Iterable[Group], sparse: Collection[int], where: str
) -> None:
    """Refuse sparse gradients for an optimizer of torch that does not take them, and dense ones for
    one that must not.

    Args:
        optimizer: over the groups.
        groups: its weights.
        sparse: identities of parameters whose gradients are sparse.
        where: config path of the optimizer, for messages.

    Raises:
        ConfigError: the names of the weights and what to do.
    """
    kind = type(optimizer).__name__
    ours = type(optimizer).__module__.startswith("torch.optim")
    weights = [weight for group in groups for weight in group.weights]
    rows = [weight.name for weight in weights if id(weight.parameter) in sparse]
    whole = [weight.name for weight in weights if id(weight.parameter) not in sparse]
    if kind == "SparseAdam" and ours and whole:
        raise ConfigError(
            f"{where}.name = 'SparseAdam': it takes sparse gradients only, and those of {join_first(whole, 3)} are dense; give "
            "these to another optimizer, by OPTIMIZER.others, or make their embedding sparse"
        )
    if not rows or not ours:
        return
    if kind not in TAKE_SPARSE:
        raise ConfigError(
            f"{where}.name: {kind} takes no sparse gradients, as those of {join_first(rows, 3)} are; give these to SparseAdam, "
            f"as in OPTIMIZER.others={{rows: {{name: SparseAdam, match: {rows[0]!r}}}}}, or take an embedding without "
            "sparse=True"
        )
    if any(group.get("momentum") for group in optimizer.param_groups):
        raise ConfigError(
            f"{where}.momentum: the gradients of {join_first(rows, 3)} are sparse, and their velocity would be so, which "
            "grows with each update; give these weights to SparseAdam by OPTIMIZER.others, or set momentum 0 for them"
        )
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        raise ConfigError(
            f"{where}.weight_decay: the gradients of {join_first(rows, 3)} are sparse, and a decay of all rows would make them "
            "dense; give these weights to SparseAdam by OPTIMIZER.others, or set weight_decay 0 for them"
        )
