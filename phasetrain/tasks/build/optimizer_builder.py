"""Builds strategy and updaters (sections DISTRIBUTED and OPTIMIZER)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.config.addons import require_service
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import parameters
from phasetrain.config.sections.keys import read_section
from phasetrain.distributed import STRATEGIES, Ordered, Strategy, buffer_lookup
from phasetrain.errors import ConfigError
from phasetrain.optim import SCALERS, SCHEDULES, GuardSettings, MultiOptimizer, Updater
from phasetrain.optim.groups import list_weights, split_by_note, tabulate
from phasetrain.optim.schedules.param_schedules import (
    GroupSchedules,
    HeldSchedule,
    Schedules,
    StageOptions,
)
from phasetrain.optim.schedules.schedules import check_schedule
from phasetrain.optim.update.gradients import GradientSettings
from phasetrain.optim.update.sparse import find_sparse_weights
from phasetrain.tasks.base import TASKS, Task, makes_several_passes
from phasetrain.tasks.build.optimizer_factory import (
    OptimizerSpec,
    list_optimizer_specs,
    make_factory,
    reject_own_limits,
)
from phasetrain.tasks.build.sections import (
    DISTRIBUTED_KEYS,
    OPTIMIZER_KEYS,
    BuildContext,
    parameters_of,
    split_item,
)
from phasetrain.tasks.build.weights_builder import describe_freezes, tabulate_frozen

NEEDS_WHOLE_WEIGHTS = (
    "each rank would need all gradients and weights, unsharded; use DISTRIBUTED.strategy=ddp with "
    "DISTRIBUTED.reduction=native"
)
NEEDS_WHOLE_STATE = (
    "each rank would need the whole state of the optimizer; use DISTRIBUTED.strategy=ddp"
)
SEVERAL_PASSES = (
    "a task with several gradient passes in a step averages dense gradients of the whole model "
    "over ranks; use DISTRIBUTED.strategy=ddp and no sparse embedding"
)
MOVES_ALL_ROWS = (
    "the ascent moves every weight, including rows that the batch does not use; leave one of them "
    "out"
)

STAGED = ("lr", "momentum", "weight_decay")
"""Options of an optimizer that a stage may change."""


def build_strategy(context: BuildContext) -> Strategy:
    """Return how ranks share an update; without a process group, the strategy of a single
    process."""
    section = context.config.DISTRIBUTED
    if section.reduction == "ordered":
        if section.strategy not in ("none", "ddp"):
            raise ConfigError(
                "DISTRIBUTED.reduction = 'ordered' and DISTRIBUTED.strategy = "
                f"{section.strategy!r}: ordered reduction sums the gradients itself, which only "
                "the strategies none and ddp allow; use one of them",
                code="config.conflict",
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
            f"{section.strategy!r}: this strategy cannot compress its communication; set "
            "DISTRIBUTED.communication=none, or use the strategy ddp"
        )
    return STRATEGIES.build(section.strategy, params, where="DISTRIBUTED", facts=facts)


def build_updaters(
    context: BuildContext,
    model: nn.Module,
    loss: nn.Module,
    facts: Mapping[str, Any],
    strategy: Strategy | None = None,
    stages: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Updater]:
    """Return the updaters of all parameters that require a gradient, by label.

    A task with `separate_updaters` gets one for each entry of OPTIMIZER.others; otherwise the main
    one steps all optimizers.

    Args:
        model: as the strategy has prepared it.
        loss: as the strategy has prepared it.
        facts: values that parts may ask for by name.
        strategy: how ranks share an update; None: a single process.
        stages: facts of each stage.
    """
    strategy = strategy or Strategy(context.world)
    trained = list_weights(model, loss)
    if not trained:
        raise ConfigError(
            f"MODEL.name = {context.config.MODEL.name!r}: the model has no parameters to train"
        )
    specs = _list_specs(context, model, loss, facts)
    task = TASKS.find(context.config.TASK.name, "TASK.name")
    passes = ""
    if makes_several_passes(task):
        passes = f"TASK.name = {context.config.TASK.name!r}"
    check_conflicts(context, strategy, specs, find_sparse_weights(model, loss), passes)
    together = [specs]
    if isinstance(task, type) and issubclass(task, Task) and task.separate_updaters:
        together = [[spec] for spec in specs]
    else:
        reject_own_limits(specs)
    return {
        mine[0].label: _build_updater(context, mine, (model, loss), facts, strategy, stages)
        for mine in together
    }


def tabulate_groups(
    context: BuildContext, model: nn.Module, loss: nn.Module, facts: Mapping[str, Any]
) -> list[tuple[str, str, str, str]]:
    """Return a row for each parameter group, and for frozen parameters."""
    specs = _list_specs(context, model, loss, facts)
    rows = []
    for spec in specs:
        for options, weights, scalars, names in tabulate(spec.groups):
            prefix = f"{spec.label or 'OPTIMIZER'} ({spec.name}): " if len(specs) > 1 else ""
            rows.append((prefix + options, weights, scalars, names))
    if len(rows) == 1:  # a single group says nothing that the summary of the model does not
        rows = []
    return rows + tabulate_frozen(model)


def _list_specs(
    context: BuildContext, model: nn.Module, loss: nn.Module, facts: Mapping[str, Any]
) -> list[OptimizerSpec]:
    """Return the optimizers; weights that are frozen for a time are in separate groups."""
    # torch's fused SGD fails if only some weights of a group have a momentum buffer, and a frozen
    # weight gets its first update later than the others.
    notes = describe_freezes(context, model, facts)
    frozen = list_weights(model, loss, trained=False)
    specs = list_optimizer_specs(context.config.OPTIMIZER, list_weights(model, loss), frozen)
    return [replace(spec, groups=split_by_note(spec.groups, notes)) for spec in specs]


def _build_updater(
    context: BuildContext,
    specs: Sequence[OptimizerSpec],
    modules: tuple[nn.Module, nn.Module],
    facts: Mapping[str, Any],
    strategy: Strategy,
    stages: Sequence[Mapping[str, Any]],
) -> Updater:
    section = context.config.OPTIMIZER
    settings = {key: value for key, value in section.items() if key in OPTIMIZER_KEYS}
    settings |= specs[0].limits
    # The scaler comes first: whether there is one decides about the kernels of SGD, see `fusable`.
    scaler = context.named(
        SCALERS,
        settings["scaler"],
        f"{specs[0].where}.scaler",
        {**facts, "shards": strategy.shards_optimizer},
    )
    sparse = find_sparse_weights(*modules)
    groups = [group for spec in specs for group in spec.groups]
    own = {id(weight.parameter) for group in groups for weight in group.weights}
    make = make_factory(
        specs,
        facts,
        scaled=scaler is not None,
        averaged=context.config.MODEL.schedule_free is not None,
        sparse={id(weight) for weight in sparse},
        used=context.used,
    )
    # Through the strategy, which hands its own tensors (shards, flat buffers) to the optimizer.
    optimizer = strategy.make_optimizer(make, [group.to_param_group() for group in groups])
    sam = None
    if section.sam is not None:
        settings_class = require_service("SamSettings", "optimizers", "OPTIMIZER.sam")
        sam = read_section(settings_class, section.sam)
    return Updater(
        optimizer,
        scaler=scaler,
        schedules=Schedules(
            build_schedules(context, section.SCHEDULES, "OPTIMIZER", facts, optimizer.defaults),
            [
                build_stage_options(context, config, {**facts, **extra}, number)
                for number, (config, extra) in enumerate(zip(context.stages, stages, strict=False))
            ],
            build_group_schedules(context, specs, optimizer, facts),
            sum(len(spec.groups) for spec in specs if not spec.label),
        ),
        gradients=replace(
            read_section(GradientSettings, settings),
            sparse=[weight for weight in sparse if id(weight) in own],
        ),
        guard=replace(
            read_section(GuardSettings, settings),
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
        option: _build_schedule(
            context,
            item,
            f"{where}.SCHEDULES.{option}",
            {**facts, "base_value": values.get(option, 1.0)},
        )
        for option, item in section.items()
    }


def _build_schedule(
    context: BuildContext, item: Any, where: str, facts: Mapping[str, Any]
) -> ParamScheduler:
    """Return a schedule; `every: epoch` holds it within an epoch, unless `every` is a parameter of
    the schedule itself."""
    every = _find_interval(item, where)
    if every is None:
        return _build_unheld(context, item, where, facts)
    made = _build_unheld(context, parameters_of(item, {"every"}), where, facts)
    if every == "epoch":
        return HeldSchedule(made)
    return made


def _build_unheld(
    context: BuildContext, item: Any, where: str, facts: Mapping[str, Any]
) -> ParamScheduler:
    """Return a schedule; a dotted path may name a function of `where` or a factory of one.

    Raises:
        ConfigError: it cannot be built, or a value of it is not a finite number.
    """
    name, params = split_item(item)
    factory = SCHEDULES.find(name, f"{where}.name")
    schedule: Any
    if "where" in parameters(factory) and params.keys() <= parameters(factory).keys() - {"where"}:
        schedule = partial(factory, **params)
    else:
        schedule = context.named(SCHEDULES, item, where, facts)
    check_schedule(where, schedule, facts.get("updates", 0))
    checked: ParamScheduler = schedule
    return checked


def _find_interval(item: Any, where: str) -> str | None:
    """Return `every` of a schedule; None if it has none, or as a parameter of the schedule."""
    if not isinstance(item, Mapping) or "every" not in item:
        return None
    if "every" in parameters(SCHEDULES.find(item["name"], f"{where}.name")):
        return None
    every: str = item["every"]
    return every


def build_group_schedules(
    context: BuildContext, specs: Sequence[OptimizerSpec], made: Optimizer, facts: Mapping[str, Any]
) -> GroupSchedules:
    """Return the schedules of OPTIMIZER.others and of rules of groups by number of group."""
    by_group = dict[int, Mapping[str, Any]]()
    first = 0
    for spec in specs:
        optimizer = made.optimizers[spec.label] if isinstance(made, MultiOptimizer) else made
        values = optimizer.defaults
        for number, group in enumerate(spec.groups, first):
            own: dict[str, ParamScheduler] = {}
            for option, (rule, item) in group.schedules.items():
                own |= build_schedules(
                    context, {option: item}, rule, facts, {**values, **group.options}
                )
            if own or spec.label:
                by_group[number] = own
        first += len(spec.groups)
    return by_group


def check_conflicts(
    context: BuildContext,
    strategy: Strategy,
    specs: Sequence[OptimizerSpec],
    sparse: Sequence[Tensor],
    passes: str = "",
) -> None:
    """Reject settings that do not work with sharded or with sparse gradients.

    Args:
        passes: the setting for which a step has several gradient passes; empty if none has.
    """
    section = context.config.OPTIMIZER
    distributed = context.config.DISTRIBUTED
    # Each setting as it appears in a message; empty if it is not in use.
    rows = "an embedding with sparse=True" if sparse else ""
    sharded = ""
    if strategy.shards_optimizer:
        sharded = f"DISTRIBUTED.strategy = {distributed.strategy!r}"
    ordered = "DISTRIBUTED.reduction = 'ordered'" if isinstance(strategy, Ordered) else ""
    sends = ""
    nccl = ""
    if not context.world.is_single_process:
        if distributed.communication != "none":
            sends = f"DISTRIBUTED.communication = {distributed.communication!r}"
        if context.machine.device.type == "cuda":
            nccl = "several processes on CUDA"
    others = ""
    if len(specs) > 1:
        others = f"OPTIMIZER.others = {', '.join(spec.label for spec in specs[1:])}"
    sam = ""
    ascent = ""
    schedule_free = ""
    if context.config.MODEL.schedule_free is not None:
        schedule_free = "MODEL.schedule_free"
    if section.sam is not None:
        sam = f"OPTIMIZER.sam = {dict(section.sam)}"
        ascent = "OPTIMIZER.sam"
    for what, other, why in (
        (others, sharded, NEEDS_WHOLE_WEIGHTS),
        (passes, sharded, SEVERAL_PASSES),
        (rows, passes if not context.world.is_single_process else "", SEVERAL_PASSES),
        (sam, sharded, NEEDS_WHOLE_WEIGHTS),
        (schedule_free, sharded, NEEDS_WHOLE_STATE),
        (rows, sharded or ordered, NEEDS_WHOLE_WEIGHTS),
        (rows, sends, "torch cannot compress sparse gradients"),
        (rows, nccl, "NCCL cannot sum sparse gradients; leave sparse=True out, or use the CPU"),
        (rows, ascent, MOVES_ALL_ROWS),
    ):
        if what and other:
            raise ConfigError(f"{what} and {other}: {why}", code="config.conflict")


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
    stage_schedules = context.config.PHASES.stages[stage].get("OPTIMIZER", {}).get("SCHEDULES", {})
    # Only what the stage itself sets runs over the stage; inherited schedules run over the whole
    # run.
    own = {option: item for option, item in section.SCHEDULES.items() if option in stage_schedules}
    schedules = build_schedules(context, own, where, facts, section)
    changed = {
        option: (whole.get(option), section[option]) for option in section if option in STAGED
    }
    for option, (before, now) in changed.items():
        if before is None and now is not None:
            raise ConfigError(
                f"{where}.{option} = {now}: OPTIMIZER.{option} has no value for the whole run; "
                "set it too"
            )
    return StageOptions(
        schedules, {option: pair for option, pair in changed.items() if pair[0] != pair[1]}
    )
