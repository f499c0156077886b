"""Assigns weights to the optimizers of OPTIMIZER and OPTIMIZER.others."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from phasetrain.errors import ConfigError
from phasetrain.optim import OPTIMIZERS, MultiOptimizer, fusable
from phasetrain.optim.averaging.averages import is_schedule_free
from phasetrain.optim.deferred_compiler import defer_compiler
from phasetrain.optim.groups import (
    SELECTORS,
    Group,
    Weight,
    check_options,
    group_weights,
)
from phasetrain.optim.multi_optimizer import MAIN, assign_weights, refuse_closures
from phasetrain.optim.optimizers import list_torch_optimizers, step_first_gradients
from phasetrain.optim.update.sparse import check_sparse
from phasetrain.tasks.build.sections import OPTIMIZER_KEYS, parameters_of

LIMITS = ("clip_norm", "clip_value", "scaler")
"""Keys of OPTIMIZER that an entry of OPTIMIZER.others may set for its own updater."""

OTHER_KEYS = frozenset({"name", "lr", "groups", "SCHEDULES", *LIMITS, *SELECTORS})
"""Keys of an entry of OPTIMIZER.others that are its own; all others are parameters of the
optimizer."""


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer of the config and its weights.

    Attributes:
        label: under OPTIMIZER.others; empty for the main one.
        where: config path.
        name: name of the optimizer.
        lr: learning rate.
        params: parameters of the optimizer.
        groups: its weights.
        limits: keys of `LIMITS` that its entry sets.
    """

    label: str
    where: str
    name: str
    lr: float
    params: Mapping[str, Any]
    groups: Sequence[Group]
    limits: Mapping[str, Any] = field(default_factory=dict)


def list_optimizer_specs(
    section: Mapping[str, Any], trained: Sequence[Weight], frozen: Sequence[Weight] = ()
) -> list[OptimizerSpec]:
    """Return every optimizer of section OPTIMIZER with its weights, the main one first.

    Args:
        section: OPTIMIZER.
        trained: weights of the run.
        frozen: weights that the run does not train; rules of groups may select these alone.

    Raises:
        ConfigError: a rule selects nothing, or two rules select one weight; see `group_weights`
            and `assign_weights`.
    """
    others = section["others"]
    weights = assign_weights(trained, others) if others else {MAIN: list(trained)}
    groups = group_weights(
        weights[MAIN],
        section["groups"],
        lr=section["lr"],
        layer_decay=section["layer_decay"],
        frozen=frozen,
    )
    params = parameters_of(section, OPTIMIZER_KEYS)
    specs = [OptimizerSpec(MAIN, "OPTIMIZER", section["name"], section["lr"], params, groups)]
    for label, other in others.items():
        where = f"OPTIMIZER.others.{label}"
        lr = other.get("lr", section["lr"])
        schedules = {
            option: (where, schedule) for option, schedule in (other.get("SCHEDULES") or {}).items()
        }
        groups = group_weights(
            weights[label],
            other.get("groups", ()),
            lr=lr,
            where=f"{where}.groups",
            frozen=frozen,
            schedules=schedules,
        )
        params = parameters_of(other, OTHER_KEYS)
        limits = {key: other[key] for key in LIMITS if key in other}
        specs.append(OptimizerSpec(label, where, other["name"], lr, params, groups, limits))
    return [_arrange_groups(spec) for spec in specs]


def _arrange_groups(spec: OptimizerSpec) -> OptimizerSpec:
    """Return the spec with its groups as the optimizer wants them.

    A class that decides by the names and kinds of weights how to update them has a class method
    `arrange_groups(groups, lr, params, where)`, which returns the groups of the config in the order
    and with the options that it wants, see `phasetrain.optim.Muon`.
    """
    arrange_groups = getattr(
        OPTIMIZERS.find(spec.name, f"{spec.where}.name"), "arrange_groups", None
    )
    if arrange_groups is None:
        return spec
    groups = arrange_groups(spec.groups, spec.lr, spec.params, spec.where)
    return replace(spec, groups=groups)


def reject_own_limits(specs: Sequence[OptimizerSpec]) -> None:
    """Reject limits of an optimizer that steps together with others, whose whole gradient is
    limited."""
    for spec in specs:
        for key, value in spec.limits.items():
            raise ConfigError(
                f"{spec.where}.{key} = {value!r}: all optimizers of this task step together, with "
                f"OPTIMIZER.{key}; set that, or use a task with separate_updaters",
                code="config.conflict",
            )


def _check_schedule_free(spec: OptimizerSpec, *, averaged: bool) -> None:
    """Reject a schedule-free optimizer whose weights for use nothing would keep."""
    if not averaged:
        raise ConfigError(
            f"{spec.where}.name = {spec.name!r}: a schedule-free optimizer trains with other "
            "weights than those for use, which MODEL.schedule_free tests and saves; set "
            "MODEL.schedule_free={}",
            code="optimizer.schedule_free",
        )


def make_factory(
    specs: Sequence[OptimizerSpec],
    facts: Mapping[str, Any],
    *,
    scaled: bool,
    averaged: bool,
    sparse: AbstractSet[int],
    used: dict[str, Any],
) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """Return a factory of the optimizer over groups of parameters.

    Args:
        specs: the optimizers, in the order of the groups.
        facts: facts of the run.
        scaled: whether a gradient scaler is in use.
        averaged: whether the config has MODEL.schedule_free.
        sparse: identities of parameters whose gradients are sparse.
        used: filled with the facts that were passed.
    """

    def build_one(spec: OptimizerSpec, given: list[dict[str, Any]]) -> Optimizer:
        own: dict[str, Any] = {"lr": spec.lr, "params": given}
        if "fused" not in spec.params:
            # Fused kernels take dense gradients of real numbers only.
            takes = not any(
                id(weight.parameter) in sparse or weight.parameter.is_complex()
                for group in spec.groups
                for weight in group.weights
            )
            own["fused"] = takes and fusable(spec.name, spec.params, scaled=scaled)
        made = OPTIMIZERS.build(
            spec.name, spec.params, where=spec.where, facts={**facts, **own}, used=used
        )
        if isinstance(made, torch.optim.SGD):
            step_first_gradients(made)
        if is_schedule_free(made):
            made.train()  # has no state yet, so no weight moves
            _check_schedule_free(spec, averaged=averaged)
        refuse_closures(made, spec.where)
        check_options(spec.groups, made, spec.where)
        check_sparse(made, spec.groups, sparse, spec.where)
        return made

    def build(given: list[dict[str, Any]]) -> Optimizer:
        defer_compiler({Optimizer, *list_torch_optimizers().values()})
        if len(specs) == 1:
            return build_one(specs[0], given)
        made = {}
        left = list(given)
        for spec in specs:
            made[spec.label] = build_one(spec, left[: len(spec.groups)])
            left = left[len(spec.groups) :]
        return MultiOptimizer(made)

    return build
