"""Optimizers for large batches, whose steps are scaled layer by layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phasetrain.config.checks import check_at_least, check_below_one
from phasetrain.optim.optimizers import OPTIMIZERS, Betas, Parameters

SCALED_NDIM = 2
"""Dimensions from which on a weight is scaled: biases and norms are not."""


class LayerwiseOptimizer(Optimizer, ABC):
    """An optimizer that moves each weight by itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update from the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    @abstractmethod
    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one weight with the options of its group."""


@OPTIMIZERS.register("lars")
class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling of SGD (You, Gitman and Ginsburg 2017, arXiv:1708.03888).

    With weight w, gradient g and weight decay d, each matrix moves at
    `lr * trust * |w| / (|g| + d |w|)`; biases and the weights of norms, which have one dimension,
    move at `lr` and do not decay.

    Args:
        params: weights, or groups of them.
        lr: learning rate per update.
        momentum: decay of the velocity per update, in [0, 1).
        weight_decay: L2 penalty, added to the gradient.
        trust: how far a layer is trusted to move, relative to the size of its weights.
        clip: never move faster than SGD at `lr` would, which is called LARC.
        nesterov: look ahead along the velocity.
        all_weights: scale biases and norms like matrices, and let them decay; those without a
            weight or a gradient above 0 move as in SGD, without decay. As LARC in Apex.
        joint_norm: the norm of the gradient is `|g + d w|`, and weights that are not scaled decay,
            too, as in VISSL.

    Raises:
        ValueError: a negative number, or a momentum outside [0, 1).
    """

    def __init__(  # noqa: PLR0913 - parameters of the part, which a config names
        self,
        params: Parameters,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        *,
        clip: bool = False,
        nesterov: bool = False,
        all_weights: bool = False,
        joint_norm: bool = False,
    ) -> None:
        check_at_least(0, lr=lr, weight_decay=weight_decay, trust=trust)
        check_below_one(momentum=momentum)
        options = {"momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        flags = {"clip": clip, "nesterov": nesterov}
        flags |= {"all_weights": all_weights, "joint_norm": joint_norm}
        super().__init__(params, {"lr": lr, **options, **flags})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the groups; checkpoints of version 0.1 lack the last two options."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("all_weights", False)
            group.setdefault("joint_norm", False)

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr = group["lr"]
        momentum = group["momentum"]
        if weight.ndim >= SCALED_NDIM or group["all_weights"]:
            # Scaled before momentum, so that a velocity keeps the rates at which its gradients were
            # taken.
            gradient = self._scale(weight, gradient, group)
        elif group["joint_norm"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        if momentum:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            velocity = state["momentum_buffer"].mul_(momentum).add_(gradient)
            if group["nesterov"]:
                gradient = gradient.add(velocity, alpha=momentum)
            else:
                gradient = velocity
        weight.add_(gradient, alpha=-lr)

    def _scale(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the gradient of a weight with its decay, scaled."""
        decay = group["weight_decay"]
        decayed = gradient.add(weight, alpha=decay)
        size = torch.linalg.vector_norm(weight)
        norm = torch.linalg.vector_norm(gradient)
        total = torch.linalg.vector_norm(decayed) if group["joint_norm"] else norm + decay * size
        scale = _ratio(group["trust"] * size, total)
        if group["clip"]:
            lr = group["lr"]
            scale = (scale / lr).clamp(max=1.0) if lr else torch.zeros_like(scale)
        scaled = decayed * scale
        if group["all_weights"] and not group["joint_norm"]:
            return torch.where((size > 0) & (norm > 0), scaled, gradient)
        return scaled


@OPTIMIZERS.register("lamb")
class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, arXiv:1904.00962): Adam with
    the steps of each layer scaled to the norm of its weights.

    Args:
        params: weights, or groups of them.
        lr: learning rate per update.
        betas: decay per update of the running mean and of the running square of the gradient.
        eps: added to the denominator.
        weight_decay: share of a weight that is taken off, as a part of the step that is scaled.

    Raises:
        ValueError: a negative number, or betas outside [0, 1).
    """

    def __init__(
        self,
        params: Parameters,
        lr: float,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        check_at_least(0, lr=lr, weight_decay=weight_decay, eps=eps)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {tuple(betas)}: expected two numbers in [0, 1)")
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        )

    def _move(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        first, second = group["betas"]
        if not state:
            # Named as in torch's optimizers: `load_state_dict` neither moves nor casts `step`.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        steps = state["step"].item()  # on the CPU, so nothing waits
        mean = state["exp_avg"].lerp_(gradient, 1 - first) / (1 - first**steps)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second) / (
            1 - second**steps
        )
        move = mean / (square.sqrt() + group["eps"])
        if weight.ndim >= SCALED_NDIM:
            # Decay is a part of the move before it is scaled, unlike AdamW's (algorithm 2 of the
            # paper).
            move = move.add(weight, alpha=group["weight_decay"])
            move = move * _ratio(torch.linalg.vector_norm(weight), torch.linalg.vector_norm(move))
        weight.add_(move, alpha=-group["lr"])


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below, and 1 where either is 0: a layer at zero moves as it would without
    scaling."""
    return torch.where((above > 0) & (below > 0), above / below, torch.ones_like(above))
