"""Muon for hidden matrices, with AdamW for all other weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from phasetrain.config.checks import check_below_one
from phasetrain.errors import ConfigError
from phasetrain.optim.groups import Group, Weight
from phasetrain.optim.multi_optimizer import MAIN, MultiOptimizer
from phasetrain.optim.optimizers import OPTIMIZERS, Betas

ALGORITHMS = ("muon", "adamw")
MATRIX_NDIM = 2

EMBEDDINGS = frozenset({"Embedding", "EmbeddingBag"})
"""Classes of modules whose matrices are tables of rows, of which a batch uses a few."""

INPUTS_AND_OUTPUTS = (
    *("head.*", "*.head.*", "heads.*", "*_head.*"),
    *("classifier.*", "*.classifier.*", "fc.*", "*.fc.*", "score.*", "*.score.*"),
    *("*embed*", "*position*", "*prototypes*"),
)
"""Usual names of output layers and of embeddings, as shell patterns."""


@OPTIMIZERS.register("muon")
class Muon(MultiOptimizer):
    """Orthogonalized momentum for matrices of hidden layers, AdamW for all other weights (Jordan et
    al. 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon and torch.optim.AdamW).

    AdamW updates embeddings, output layers (by their names, see `INPUTS_AND_OUTPUTS`) and
    everything that is not a matrix, such as biases, norms and convolutions. The option `algorithm`
    of a rule of OPTIMIZER.groups chooses for the weights of the rule.

    Args:
        params: groups of weights, each with the option `algorithm`; groups of Muon come first.
        lr: learning rate per update of both algorithms.
        momentum: decay of the momentum per update, in [0, 1), of Muon.
        weight_decay: share of a weight that is taken off per update and unit of learning rate.
        nesterov: look ahead along the momentum (Muon).
        ns_steps: Newton-Schulz iterations of an update, in bfloat16 (Muon).
        adjust_lr: factor of the learning rate of a matrix with R rows and C columns:
            `match_rms_adamw`: 0.2 sqrt(max(R, C)), so that learning rates and weight decays of
            AdamW fit (Liu et al. 2025, arXiv:2502.16982); `original`: sqrt(max(1, R / C)), for
            learning rates around 0.02.
        adamw_lr_scale: factor of the learning rate of weights that AdamW updates.
        betas, eps: as for AdamW.
        fused: fact; one kernel for all weights of AdamW.

    Raises:
        ValueError: momentum is not below 1.
    """

    def __init__(  # noqa: PLR0913 - the keys of a config, all but one with a default
        self,
        params: Sequence[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adamw_lr_scale: float = 1.0,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = True,
    ) -> None:
        if "Muon" not in vars(torch.optim):
            raise ValueError(
                f"torch {torch.__version__} has no Muon; install torch 2.9 or later, or choose "
                "another optimizer"
            )
        check_below_one(momentum=momentum)
        muon, adamw = (
            [dict(group) for group in params if group["algorithm"] == algorithm]
            for algorithm in ALGORITHMS
        )
        made: dict[str, torch.optim.Optimizer] = {}
        if muon:
            made[MAIN] = torch.optim.Muon(
                muon,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr,
            )
        if adamw:
            made["adamw"] = torch.optim.AdamW(
                adamw,
                lr=lr,
                betas=(betas[0], betas[1]),
                eps=eps,
                weight_decay=weight_decay,
                fused=fused,
            )
        super().__init__(made)
        # Those of both in all groups: rules and schedules may set any of them for all weights, and
        # torch ignores the options of the other algorithm.
        self.defaults = {"algorithm": "muon"}
        for optimizer in made.values():
            self.defaults = {**optimizer.defaults, **self.defaults}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    @classmethod
    def arrange_groups(
        cls, groups: Sequence[Group], lr: float, params: Mapping[str, Any], where: str
    ) -> list[Group]:
        """Return the groups split by algorithm, groups of Muon first.

        Args:
            groups: as the rules of the config make them.
            lr: learning rate.
            params: parameters of the optimizer.
            where: config path of the optimizer.

        Raises:
            ConfigError: no weight is left for Muon, or a rule chooses an algorithm that does not
                exist or does not fit a weight.
        """
        by_algorithm: dict[str, list[Group]] = {algorithm: [] for algorithm in ALGORITHMS}
        for group in groups:
            for algorithm in ALGORITHMS:
                weights = [
                    weight
                    for weight in group.weights
                    if _choose_algorithm(weight, group, where) == algorithm
                ]
                if not weights:
                    continue
                options = group.options | {"algorithm": algorithm}
                scale = params.get("adamw_lr_scale", 1.0)
                if algorithm == "adamw" and scale != 1.0:
                    options["lr"] = options.get("lr", lr) * scale
                by_algorithm[algorithm].append(replace(group, options=options, weights=weights))
        if not by_algorithm["muon"]:
            raise ConfigError(
                f"{where}.name = 'muon': the model has no matrix of a hidden layer for Muon, and "
                "AdamW would update all weights; use adamw, or choose weights with a rule of "
                f"{where}.groups, such as {{match: 'layers.*', algorithm: muon}}",
                code="optimizer.no_matrices",
            )
        return [group for algorithm in ALGORITHMS for group in by_algorithm[algorithm]]


def _choose_algorithm(weight: Weight, group: Group, where: str) -> str:
    """Return the algorithm that a rule has chosen, otherwise the one for this kind of weight."""
    is_matrix = weight.parameter.ndim == MATRIX_NDIM
    if "algorithm" in group.options:
        chosen: str = group.options["algorithm"]
        if chosen not in ALGORITHMS:
            raise ConfigError(
                f"{where}.groups: algorithm = {chosen!r}: expected one of {', '.join(ALGORITHMS)}"
            )
        if chosen == "muon" and not is_matrix:
            raise ConfigError(
                f"{where}.groups: algorithm = 'muon': {weight.name} has shape "
                f"{tuple(weight.parameter.shape)}, and Muon updates matrices; let the rule select "
                "matrices only"
            )
        return chosen
    if (
        not is_matrix
        or weight.kind in EMBEDDINGS
        or any(fnmatchcase(weight.name, pattern) for pattern in INPUTS_AND_OUTPUTS)
    ):
        return "adamw"
    return "muon"
