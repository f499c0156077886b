"""Builds strategy and updaters (sections DISTRIBUTED and OPTIMIZER)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import parameters
from phasetrain.distributed import STRATEGIES, Ordered, Strategy, buffer_lookup
from phasetrain.errors import ConfigError
from phasetrain.optim import SCALERS, SCHEDULES, GuardSettings, MultiOptimizer, Updater
from phasetrain.optim.groups import apart, weights_of
from phasetrain.optim.schedules.param_schedules import GroupSchedules, Schedules, StageOptions
from phasetrain.optim.update.gradients import GradientSettings
from phasetrain.optim.update.sam import sam_settings
from phasetrain.optim.update.sparse import find_sparse_weights
from phasetrain.tasks.build.optimizer_factory import Share, maker, rows, shares_of
from phasetrain.tasks.build.sections import DISTRIBUTED_KEYS, BuildContext, parameters_of
from phasetrain.tasks.build.weights_builder import describe_freezes, still

WHOLE = (
    "each process would have to know all gradients and weights as they are; take "
    "DISTRIBUTED.strategy=ddp with DISTRIBUTED.reduction=native"
)
ASCENT = (
    "in the ascent every weight moves, rows that a batch does not have included; take one of them"
)

STAGED = ("lr", "momentum", "weight_decay")
"""Options of an optimizer that a stage may change."""


def build_strategy(context: BuildContext) -> Strategy:
    """Return how the processes share an update; a process that has joined no group trains
    alone."""
    section = context.config.DISTRIBUTED
    if section.reduction == "ordered":
        if section.strategy not in ("none", "ddp"):
            raise ConfigError(
                "DISTRIBUTED.reduction = 'ordered' and DISTRIBUTED.strategy = "
                f"{section.strategy!r}: it adds gradients itself, which only the strategies none "
                "and ddp leave to it; take one of them"
            )
        return Ordered(context.world, section.virtual_shards)
    if context.world.control is None:
        return Strategy(context.world)
    params = parameters_of(section, DISTRIBUTED_KEYS)
    facts = {
        "world": context.world,
        "communication": section.communication,
        "precision": context.machine.precision,
    }
    if section.communication != "none" and "communication" not in parameters(
        STRATEGIES.find(section.strategy)
    ):
        raise ConfigError(
            f"DISTRIBUTED.communication = {section.communication!r} and DISTRIBUTED.strategy = "
            f"{section.strategy!r}: it has no such choice; take "
            "DISTRIBUTED.communication=none, or the strategy ddp"
        )
    return STRATEGIES.build(section.strategy, params, where="DISTRIBUTED", facts=facts)


def build_updaters(
    context: BuildContext,
    model: nn.Module,
    loss: nn.Module,
    facts: Mapping[str, Any],
    strategy: Strategy | None = None,
    stages: Sequence[Mapping[str, Any]] = (),
    *,
    separate: bool = False,
) -> dict[str, Updater]:
    """Return the updaters of all parameters that require a gradient, by label.

    Args:
        model: as the strategy has prepared it.
        loss: as the strategy has prepared it.
        facts: values that parts may ask for by name.
        strategy: how ranks share an update; None: a single process.
        stages: facts of each stage.
        separate: make an updater for each entry of OPTIMIZER.others; otherwise the main one
            steps all optimizers.
    """
    strategy = strategy or Strategy(context.world)
    trained = weights_of(model, loss)
    if not trained:
        raise ConfigError(f"MODEL.name = {context.config.MODEL.name!r} has no parameter to train")
    shares = _assign_shares(context, model, loss, facts)
    check_conflicts(context, strategy, shares, find_sparse_weights(model, loss))
    together = [shares]
    if separate:
        together = [[share] for share in shares]
    return {
        mine[0].label: _build_updater(context, mine, (model, loss), facts, strategy, stages)
        for mine in together
    }


def tabulate_groups(
    context: BuildContext, model: nn.Module, loss: nn.Module, facts: Mapping[str, Any]
) -> list[tuple[str, str, str, str]]:
    """Return a row for each parameter group, and for frozen parameters."""
    shares = _assign_shares(context, model, loss, facts)
    if sum(len(share.groups) for share in shares) > 1:
        return [*rows(shares), *still(model)]
    return still(model)


def _assign_shares(
    context: BuildContext, model: nn.Module, loss: nn.Module, facts: Mapping[str, Any]
) -> list[Share]:
    """Return the weights of each optimizer; weights that are frozen at times are in own groups."""
    # torch's fused SGD fails if only some weights of a group have a momentum buffer, and a frozen
    # weight gets its first update later than the others.
    spells = describe_freezes(context, model, facts)
    return [
        replace(share, groups=apart(share.groups, spells))
        for share in shares_of(context.config.OPTIMIZER, weights_of(model, loss))
    ]


def _build_updater(
    context: BuildContext,
    shares: Sequence[Share],
    modules: tuple[nn.Module, nn.Module],
    facts: Mapping[str, Any],
    strategy: Strategy,
    stages: Sequence[Mapping[str, Any]],
) -> Updater:
    section = context.config.OPTIMIZER
    shards = {"shards": strategy.shards_optimizer}
    # The scaler comes first: whether there is one decides about the kernels of SGD, see `fusable`.
    scaler = context.named(SCALERS, section.scaler, "OPTIMIZER.scaler", {**facts, **shards})
    sparse = find_sparse_weights(*modules)
    groups = [group for share in shares for group in share.groups]
    own = {id(weight.parameter) for group in groups for weight in group.weights}
    used: dict[str, Any] = {}
    make = maker(
        shares,
        facts,
        scaled=scaler is not None,
        sparse={id(weight) for weight in sparse},
        used=used,
    )
    # Through the strategy, which hands its own tensors (shards, flat buffers) to the optimizer.
    optimizer = strategy.make_optimizer(make, [group.as_given() for group in groups])
    context.used.update(
        {key: value for key, value in used.items() if not key.endswith((".params", ".lr"))}
    )
    if shares[0].label:  # all of its groups follow the schedules of its entry
        by_group: GroupSchedules = dict.fromkeys(
            range(len(groups)),
            build_schedules(
                context, shares[0].schedules, shares[0].where, facts, optimizer.defaults
            ),
        )
    else:
        by_group = build_group_schedules(context, shares, optimizer, facts)
    sam = None
    if section.sam is not None:
        sam = sam_settings(section.sam)
    return Updater(
        optimizer,
        scaler=scaler,
        schedules=Schedules(
            build_schedules(context, section.SCHEDULES, "OPTIMIZER", facts, optimizer.defaults),
            [
                build_stage_options(context, config, {**facts, **known}, number)
                for number, (config, known) in enumerate(zip(context.stages, stages, strict=False))
            ],
            by_group,
        ),
        gradients=GradientSettings(
            section.clip_norm,
            section.clip_value,
            [weight for weight in sparse if id(weight) in own],
        ),
        guard=GuardSettings(
            section.on_nonfinite,
            section.skip_budget,
            names=[weight.name for group in groups for weight in group.weights],
            buffers=buffer_lookup(*modules),
        ),
        strategy=strategy,
        sam=sam,
    )


def build_schedules(
    context: BuildContext,
    section: Mapping[str, Any],
    where: str,
    facts: Mapping[str, Any],
    values: Mapping[str, Any],
) -> dict[str, ParamScheduler]:
    """Return the schedules of options.

    Args:
        section: option -> schedule.
        where: config path of the section's parent.
        facts: facts of the run.
        values: value of each option, for schedules of other libraries.
    """
    return {
        option: context.named(
            SCHEDULES,
            item,
            f"{where}.SCHEDULES.{option}",
            {**facts, "base_value": values.get(option, 1.0)},
        )
        for option, item in section.items()
    }


def build_group_schedules(
    context: BuildContext, shares: Sequence[Share], made: Optimizer, facts: Mapping[str, Any]
) -> GroupSchedules:
    """Return the schedules of OPTIMIZER.others by number of group."""
    found = dict[int, Mapping[str, Any]]()
    first = 0
    for share in shares:
        if isinstance(made, MultiOptimizer) and share.label:
            values = made.optimizers[share.label].defaults
            own = build_schedules(context, share.schedules, share.where, facts, values)
            found |= dict.fromkeys(range(first, first + len(share.groups)), own)
        first += len(share.groups)
    return found


def check_conflicts(
    context: BuildContext, strategy: Strategy, shares: Sequence[Share], sparse: Sequence[Tensor]
) -> None:
    """Reject settings that do not work with sharded or with sparse gradients."""
    section = context.config.OPTIMIZER
    distributed = context.config.DISTRIBUTED
    # The name of each setting that is in use, else empty.
    rows = "an embedding with sparse=True" if sparse else ""
    pieces = ""
    if strategy.shards_optimizer:
        pieces = f"DISTRIBUTED.strategy = {distributed.strategy!r}"
    ordered = "DISTRIBUTED.reduction = 'ordered'" if isinstance(strategy, Ordered) else ""
    sends = ""
    nccl = ""
    if not context.world.is_single_process:
        if distributed.communication != "none":
            sends = f"DISTRIBUTED.communication = {distributed.communication!r}"
        if context.machine.device.type == "cuda":
            nccl = "several processes on CUDA"
    others = ""
    if len(shares) > 1:
        others = f"OPTIMIZER.others = {', '.join(share.label for share in shares[1:])}"
    sam = ""
    ascent = ""
    if section.sam is not None:
        sam = f"OPTIMIZER.sam = {dict(section.sam)}"
        ascent = "OPTIMIZER.sam"
    for what, other, why in (
        (others, pieces, WHOLE),
        (sam, pieces, WHOLE),
        (rows, pieces or ordered, WHOLE),
        (rows, sends, "torch cannot round its rows"),
        (rows, nccl, "NCCL cannot add sparse gradients; take one without it, or the CPU"),
        (rows, ascent, ASCENT),
    ):
        if what and other:
            raise ConfigError(f"{what} and {other}: {why}")


def build_stage_options(
    context: BuildContext, config: AttrDict, facts: Mapping[str, Any], stage: int
) -> StageOptions:
    """Return the changes that a stage makes to the optimizer's options.

    Args:
        config: config of the stage.
        facts: facts of the stage.
        stage: number of the stage.
    """
    whole = context.config.OPTIMIZER
    section = config.OPTIMIZER
    where = f"PHASES.stages[{stage}].OPTIMIZER"
    given = context.config.PHASES.stages[stage].get("OPTIMIZER", {}).get("SCHEDULES", {})
    # Only what the stage itself sets runs over the stage; inherited schedules run over the whole
    # run.
    own = {option: item for option, item in section.SCHEDULES.items() if option in given}
    schedules = build_schedules(context, own, where, facts, section)
    changed = {
        option: (whole.get(option), section[option]) for option in section if option in STAGED
    }
    for option, (before, now) in changed.items():
        if before is None and now is not None:
            raise ConfigError(
                f"{where}.{option} = {now}: give OPTIMIZER.{option} a value for the whole run "
                "as well"
            )
    return StageOptions(
        schedules, {option: pair for option, pair in changed.items() if pair[0] != pair[1]}
    )
