"""Fused SGD with momentum for models whose weights do not all get a gradient in every step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd


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
            **{name: group[name] for name in _OPTIONS},
        )
        for weight, momentum in zip(new, momenta, strict=True):
            optimizer.state[weight]["momentum_buffer"] = momentum
            # Its update is made: the step itself passes over weights without a gradient.
            weight.grad = None


_OPTIONS = (
    *("weight_decay", "momentum", "lr", "dampening"),
    *("nesterov", "maximize", "foreach", "fused"),
)


def _has_momentum(optimizer: Any, weight: Tensor) -> bool:
    # Not by `[]`: the state is a defaultdict.
    state = optimizer.state.get(weight)
    return state is not None and state.get("momentum_buffer") is not None
