"""Assigns weights to the optimizers of OPTIMIZER and OPTIMIZER.others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.optim import OPTIMIZERS, MultiOptimizer, fusable
from phasetrain.optim.groups import SELECTORS, Group, Weight, check_options, group_weights, table
from phasetrain.optim.multi_optimizer import MAIN, assign_weights, refuse_closures
from phasetrain.optim.update.sparse import check_sparse
from phasetrain.tasks.build.sections import OPTIMIZER_KEYS, parameters_of

OTHER_KEYS = frozenset({"name", "lr", "groups", "SCHEDULES", *SELECTORS})
"""Keys of an entry of OPTIMIZER.others that are its own; all others are parameters of the
optimizer."""


@dataclass(frozen=True)
class Share:
    """The weights of one optimizer.

    Attributes:
        label: under OPTIMIZER.others; empty for the main one.
        where: config path.
        name: name of the optimizer.
        lr: learning rate.
        params: parameters of the optimizer.
        groups: its weights.
        schedules: option -> schedule, as set for this optimizer.
    """

    label: str
    where: str
    name: str
    lr: float
    params: Mapping[str, Any]
    groups: Sequence[Group]
    schedules: Mapping[str, Any]


def shares_of(section: Mapping[str, Any], trained: Sequence[Weight]) -> list[Share]:
    """Return the share of each optimizer of a section, the main one first.

    Raises:
        ConfigError: a rule that chooses nothing, or a weight that two choose; see `group_weights`
            and `assign_weights`.
    """
    others = section["others"]
    weights = assign_weights(trained, others) if others else {MAIN: list(trained)}
    groups = group_weights(
        weights[MAIN], section["groups"], lr=section["lr"], layer_decay=section["layer_decay"]
    )
    params = parameters_of(section, OPTIMIZER_KEYS)
    found = [Share(MAIN, "OPTIMIZER", section["name"], section["lr"], params, groups, {})]
    for label, other in others.items():
        where = f"OPTIMIZER.others.{label}"
        lr = other.get("lr", section["lr"])
        groups = group_weights(
            weights[label], other.get("groups", ()), lr=lr, where=f"{where}.groups"
        )
        params = parameters_of(other, OTHER_KEYS)
        schedules = other.get("SCHEDULES") or {}
        found.append(Share(label, where, other["name"], lr, params, groups, schedules))
    return found


def maker(
    shares: Sequence[Share],
    facts: Mapping[str, Any],
    *,
    scaled: bool,
    sparse: AbstractSet[int],
    used: dict[str, Any],
) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """Return a factory of the optimizer over groups of parameters.

    Args:
        shares: weights of each optimizer, in the order of the groups.
        facts: of the run.
        scaled: whether a gradient scaler is in use.
        sparse: identities of parameters whose gradients are sparse.
        used: filled with the facts that were passed.
    """

    def one(share: Share, given: list[dict[str, Any]]) -> Optimizer:
        own: dict[str, Any] = {"lr": share.lr, "params": given}
        if "fused" not in share.params:
            # Fused kernels take dense gradients only.
            takes = not sparse & {
                id(weight.parameter) for group in share.groups for weight in group.weights
            }
            own["fused"] = takes and fusable(share.name, share.params, scaled=scaled)
        made = OPTIMIZERS.build(
            share.name, share.params, where=share.where, facts={**facts, **own}, used=used
        )
        refuse_closures(made, share.where)
        check_options(share.groups, made, share.where)
        check_sparse(made, share.groups, sparse, share.where)
        _check_schedules(share, made)
        return made

    def make(given: list[dict[str, Any]]) -> Optimizer:
        if len(shares) == 1:
            return one(shares[0], given)
        made = {}
        left = list(given)
        for share in shares:
            made[share.label] = one(share, left[: len(share.groups)])
            left = left[len(share.groups) :]
        return MultiOptimizer(made)

    return make


def rows(shares: Sequence[Share]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each group of weights, with the optimizer named where there are several."""
    for share in shares:
        for options, *others in table(share.groups):
            if len(shares) > 1:
                options = f"{share.label or 'OPTIMIZER'} ({share.name}): {options}"
            yield (options, *others)  # type: ignore[misc]


def _check_schedules(share: Share, made: Optimizer) -> None:
    for option in share.schedules.keys() - made.defaults.keys():
        raise ConfigError(
            f"{share.where}.SCHEDULES.{option}: {share.name!r} has no option {option!r}"
            f"{did_you_mean(option, list(made.defaults)) or '.'} It has {', '.join(made.defaults)}"
        )
