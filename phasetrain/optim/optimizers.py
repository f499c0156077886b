"""Optimizers by name, fused where torch has a fused kernel (section OPTIMIZER)."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from phasetrain.config.checks import check_below_one
from phasetrain.config.registry import Registry

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
Betas = tuple[float, float]

_SGD_OPTIONS = (
    *("weight_decay", "momentum", "lr", "dampening"),
    *("nesterov", "maximize", "foreach", "fused"),
)


def list_torch_optimizers() -> Mapping[str, type[Optimizer]]:
    """Return the optimizers of torch by name."""
    members = vars(torch.optim).items()
    return {
        name: thing
        for name, thing in members
        if inspect.isclass(thing) and issubclass(thing, Optimizer) and thing is not Optimizer
    }


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", "OPTIMIZER", library=list_torch_optimizers)


def fusable(name: str, params: Mapping[str, Any], *, scaled: bool) -> bool:
    """Return whether an optimizer should use its fused kernel, if it has one: several times faster,
    on CPU too.

    Not SGD under a gradient scaler: torch's fused kernel leaves the momentum uninitialised when the
    first update overflows and is skipped, and continues from there.

    Args:
        name: name of the optimizer, as in OPTIMIZER.name.
        params: parameters in the config; a kernel chosen there takes precedence.
        scaled: whether a gradient scaler is in use.
    """
    # Torch rejects fused together with either of them.
    return not {"foreach", "differentiable"} & params.keys() and not (
        scaled and name in ("sgd", "SGD")
    )


@OPTIMIZERS.register("sgd")
def make_sgd(
    params: Parameters,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
    fused: bool = True,
) -> Optimizer:
    """Stochastic gradient descent with momentum, fused (torch.optim.SGD).

    Args:
        lr: learning rate per update.
        momentum: decay of the velocity per update, in [0, 1).
        weight_decay: L2 penalty, added to the gradient.
        nesterov: look ahead along the velocity (Sutskever et al. 2013).
        fused: fact; one kernel for all weights. Changes bits, so it is decided once, by `fusable`.
    """
    # torch accepts any momentum, and from 1 on the velocity grows without bound.
    check_below_one(momentum=momentum)
    return torch.optim.SGD(
        params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=fused
    )


@OPTIMIZERS.register("adam")
def make_adam(
    params: Parameters,
    lr: float,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    fused: bool = True,
) -> Optimizer:
    """Adam, fused (Kingma and Ba 2015, arXiv:1412.6980; torch.optim.Adam).

    Args:
        lr: learning rate per update.
        betas: decay per update of the running mean and of the running square of the gradient.
        eps: added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        fused: fact; one kernel for all weights.
    """
    return torch.optim.Adam(
        params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=fused
    )


@OPTIMIZERS.register("adamw")
def make_adamw(
    params: Parameters,
    lr: float,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    fused: bool = True,
) -> Optimizer:
    """Adam with decoupled weight decay, fused (Loshchilov and Hutter 2019, arXiv:1711.05101;
    torch.optim.AdamW).

    Args:
        lr: learning rate per update.
        betas: decay per update of the running mean and of the running square of the gradient.
        eps: added to the denominator.
        weight_decay: share of a weight that is taken off per update and unit of learning rate.
        fused: fact; one kernel for all weights.
    """
    return torch.optim.AdamW(
        params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=fused
    )


def step_first_gradients(optimizer: torch.optim.SGD) -> None:
    """Let fused SGD take weights whose first gradient comes later than for other weights.

    Models with an early exit, dropped layers or experts have such weights. They make the update
    that SGD makes without fusing; all other updates keep their bits.
    """
    optimizer.register_step_pre_hook(_step_new_weights)


def _step_new_weights(optimizer: Any, args: object, kwargs: object) -> None:
    # torch's fused kernel takes one flag for all weights of a group: whether they have a momentum,
    # and fails if some do and others do not.
    groups = optimizer.param_groups
    # In nearly all steps every weight has a momentum, and looking at each would cost 0.3 us.
    if len(optimizer.state) == sum([len(group["params"]) for group in groups]):
        return
    for group in groups:
        if not group["fused"] or not group["momentum"]:
            continue
        stepping = [weight for weight in group["params"] if weight.grad is not None]
        new = [weight for weight in stepping if not _has_momentum(optimizer, weight)]
        if not new or len(new) == len(stepping):
            continue
        momenta: list[Tensor | None] = [None] * len(new)
        sgd(
            new,
            [weight.grad for weight in new],
            momenta,
            has_sparse_grad=False,
            # What a gradient scaler passes to fused optimizers.
            grad_scale=vars(optimizer).get("grad_scale"),
            found_inf=vars(optimizer).get("found_inf"),
            **{name: group[name] for name in _SGD_OPTIONS},
        )
        for weight, momentum in zip(new, momenta, strict=True):
            optimizer.state[weight]["momentum_buffer"] = momentum
            # Its update is made: the step itself passes over weights without a gradient.
            weight.grad = None


def _has_momentum(optimizer: Any, weight: Tensor) -> bool:
    # Not by `[]`: the state is a defaultdict.
    state = optimizer.state.get(weight)
    return state is not None and state.get("momentum_buffer") is not None
