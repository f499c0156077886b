"""Freezes weights and builds averages (MODEL.freeze, freeze_updates, ema and swa)."""

from collections.abc import Collection, Iterable, Mapping
from math import ceil, nan
from typing import Any

from torch import Tensor, nn

from phasetrain.distributed import Strategy
from phasetrain.errors import ConfigError
from phasetrain.models.freeze import (
    NOTHING,
    UPDATES,
    FreezeSchedule,
    FrozenNames,
    disable_gradients,
    freeze_names,
    intersect_frozen,
    match_frozen,
)
from phasetrain.optim import MultiOptimizer, Updater
from phasetrain.optim.averaging.average_settings import (
    EMASettings,
    ScheduleFreeSettings,
    read_average_settings,
)
from phasetrain.optim.averaging.averages import (
    EMA,
    SWA,
    Average,
    ScheduleFree,
    ScheduleFreeOptimizer,
    copy_model,
    is_schedule_free,
)
from phasetrain.optim.schedules.curves import TOLERANCE
from phasetrain.optim.schedules.durations import RunLength
from phasetrain.runtime.format import join_first
from phasetrain.runtime.name_patterns import match_names
from phasetrain.tasks.build.sections import BuildContext

EXCLUDE = "CHECKPOINT.exclude"


def find_frozen(context: BuildContext, model: nn.Module) -> list[FrozenNames]:
    """Return the frozen weights of each stage of PHASES.stages, or of the single stage.

    Raises:
        ConfigError: a pattern selects nothing.
    """
    configs = context.stage_configs
    base = NOTHING
    if (section := context.config.MODEL.adapters) is not None:
        from phasetrain.models.adapters import list_base_parameters

        base = freeze_names(model, list_base_parameters(model, section))
    frozen = []
    for number, config in enumerate(configs):
        patterns = config.MODEL.freeze
        if patterns == context.config.MODEL.freeze:
            frozen.append(base | match_frozen(model, patterns))
        else:
            # A message has to name the key that the user has written.
            where = f"PHASES.stages[{number}].MODEL.freeze"
            frozen.append(base | match_frozen(model, patterns, where))
    return frozen


def find_excluded(context: BuildContext, model: nn.Module, strategy: Strategy) -> list[str]:
    """Return the names of the tensors that checkpoints leave out (CHECKPOINT.exclude).

    Raises:
        ConfigError: a pattern selects nothing, or something that may change; or another part of
            the config does not go with it.
    """
    patterns = context.config.CHECKPOINT.exclude
    adapters = context.config.MODEL.adapters
    if not patterns and adapters is not None:
        # Averages and sharded checkpoints hold all weights anyway.
        holds_all = strategy.shards_weights or read_average_settings(context.config.MODEL)
        if adapters.get("save_base", False) or holds_all:
            return []
        return _list_base(context, model)
    if not patterns:
        return []
    where = f"{EXCLUDE} = [{', '.join(patterns)}]"
    _check_excludable(context, where, strategy)
    state = {
        name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)
    }
    matches: list[str] = []
    for pattern in patterns:
        matches += match_names(
            pattern,
            state,
            f"{EXCLUDE} = [{pattern}]: patterns cover whole names, such as trunk.*, and this one "
            "matches no name in the model's state_dict",
        )
    constant = _list_base(context, model)
    if changing := [name for name in matches if name not in constant]:
        raise ConfigError(
            f"{where}: {join_first(changing, 3)} may change during the run, so every checkpoint "
            "needs it; exclude only weights that MODEL.freeze freezes in all stages, and buffers "
            "of modules that are frozen as a whole",
            code="checkpoint.not_excludable",
        )
    return list(dict.fromkeys(matches))


def _list_base(context: BuildContext, model: nn.Module) -> list[str]:
    """Return the names of the tensors that never change: frozen weights, and buffers of modules
    that are frozen as a whole."""
    always = intersect_frozen(find_frozen(context, model))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        name
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
        and (
            name in always.parameters if name in parameters else _is_in_frozen_module(name, always)
        )
    ]


def _check_excludable(context: BuildContext, where: str, strategy: Strategy) -> None:
    averages = list(read_average_settings(context.config.MODEL))
    if averages:
        raise ConfigError(
            f"{where} and MODEL.{averages[0]}: the average is a second copy of all weights, which "
            "cannot be left out; remove one of the two",
            code="config.conflict",
        )
    if strategy.shards_weights:
        raise ConfigError(
            f"{where} and DISTRIBUTED.strategy = {context.config.DISTRIBUTED.strategy!r}: sharded "
            "checkpoints hold all weights; remove one of the two",
            code="config.conflict",
        )


def _is_in_frozen_module(name: str, frozen: FrozenNames) -> bool:
    """Return whether a buffer belongs to a frozen module."""
    return name.rpartition(".")[0] in frozen.modules


def freeze_parameters(context: BuildContext, model: nn.Module, loss: nn.Module) -> None:
    """Disable the gradients of parameters that are frozen in all stages, so that no optimizer
    gets them.

    Raises:
        ConfigError: nothing would be left to train.
    """
    disable_gradients(model, intersect_frozen(find_frozen(context, model)))
    if context.config.MODEL.freeze and not any(
        p.requires_grad for part in (model, loss) for p in part.parameters()
    ):
        raise ConfigError(
            f"MODEL.freeze = {list(context.config.MODEL.freeze)}: this freezes all parameters, so "
            "nothing is left to train; freeze fewer, or test the model with RUN.engine=test",
            code="config.conflict",
        )


def build_freeze_schedule(
    context: BuildContext,
    model: nn.Module,
    loss: nn.Module,
    strategy: Strategy,
    facts: Mapping[str, Any],
) -> FreezeSchedule | None:
    """Return which weights are frozen in which update; None if none ever are.

    Raises:
        ConfigError: a pattern selects nothing that trains, a duration is invalid, or all weights
            are frozen in some updates.
    """
    stages = find_frozen(context, model)
    until = find_temporary_freezes(context, model, facts)
    if not until and not any(frozen.parameters for frozen in stages):
        return None
    trained = [
        parameter
        for part in (model, loss)
        for parameter in part.parameters()
        if parameter.requires_grad
    ]
    tensors = {id(parameter): strategy.optimizer_parameter(parameter) for parameter in trained}
    return FreezeSchedule(model, stages, until, tensors)


def find_temporary_freezes(
    context: BuildContext, model: nn.Module, facts: Mapping[str, Any]
) -> list[tuple[FrozenNames, int]]:
    """Return the weights that are frozen at first, and for how many updates.

    Raises:
        ConfigError: a pattern selects nothing that trains, or a duration is invalid.
    """
    always = intersect_frozen(find_frozen(context, model))
    run = _length(facts)
    until = []
    for number, rule in enumerate(context.config.MODEL.freeze_updates):
        where = f"{UPDATES}[{number}]"
        match, duration = _rule(rule, where)
        frozen = match_frozen(model, match, f"{where}.match")
        if frozen.parameters <= always.parameters:
            raise ConfigError(
                f"{where}.match = {match}: MODEL.freeze freezes all of these weights for the whole "
                "run; drop one of the two",
                code="config.conflict",
            )
        until.append((frozen, _updates(f"{where}.for", duration, run)))
    return [(frozen, end) for frozen, end in until if end]


def describe_freezes(
    context: BuildContext, model: nn.Module, facts: Mapping[str, Any]
) -> dict[int, str]:
    """Return id of a parameter -> when it is frozen, in words, for trained parameters that are
    frozen for a time."""
    stages = find_frozen(context, model)
    until = find_temporary_freezes(context, model, facts)
    descriptions = {}
    # Duplicates too: a pattern may match any of the names of a tied weight.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        numbers = [str(number) for number, frozen in enumerate(stages) if name in frozen.parameters]
        end = max((end for frozen, end in until if name in frozen.parameters), default=0)
        notes = []
        if end:
            notes.append(f"frozen for {end} updates")
        if numbers:
            notes.append(f"frozen in stages {', '.join(numbers)}")
        if notes and parameter.requires_grad:
            descriptions[id(parameter)] = ", ".join(notes)
    return descriptions


def copy_for_averages(context: BuildContext, model: nn.Module) -> dict[str, nn.Module]:
    """Return a copy of the model for each average, made before a strategy shards it.

    Raises:
        ConfigError: the model cannot be copied.
    """
    return {name: copy_model(model, name) for name in read_average_settings(context.config.MODEL)}


def build_averages(
    context: BuildContext,
    model: nn.Module,
    copies: Mapping[str, nn.Module],
    strategy: Strategy,
    facts: Mapping[str, Any],
    updaters: Collection[Updater] = (),
) -> dict[str, Average]:
    """Return averages of the model's weights by name, sharded like the weights.

    Args:
        context: config, machine and world.
        model: the model.
        copies: name of an average -> copy of the model, see `copy_for_averages`.
        strategy: how ranks share an update.
        facts: facts of the run.
        updaters: all updaters of the run; empty if nothing trains.

    Raises:
        ConfigError: an average of these weights cannot be made.
    """
    wanted = read_average_settings(context.config.MODEL)
    schedule_free = _list_schedule_free(updaters)
    frozen = intersect_frozen(find_frozen(context, model)).modules if wanted else NOTHING.modules
    if "schedule_free" in wanted and updaters and not schedule_free:
        raise ConfigError(
            f"MODEL.schedule_free and OPTIMIZER.name = {context.config.OPTIMIZER.name!r}: this "
            "optimizer is not schedule-free; use one such as schedulefree.AdamWScheduleFree, or "
            "set MODEL.schedule_free=null",
            code="config.conflict",
        )
    # Without training nothing is taken: the length of the run is not known from its folder.
    run = _length(facts) if updaters else RunLength(0, nan, 1)
    averages: dict[str, Average] = {}
    for name, settings in wanted.items():
        if strategy.shards_weights:
            # Sharded in the same way, so that averaging pairs local shards and needs no
            # communication.
            strategy.prepare(copies[name], nn.Identity())
        if isinstance(settings, EMASettings):
            averages[name] = EMA(model, copies[name], settings)
        elif isinstance(settings, ScheduleFreeSettings):
            averages[name] = ScheduleFree(model, copies[name], settings, schedule_free, frozen)
        else:
            averages[name] = SWA(model, copies[name], settings, run, frozen)
    return averages


def _list_schedule_free(updaters: Iterable[Updater]) -> list[ScheduleFreeOptimizer]:
    optimizers: list[ScheduleFreeOptimizer] = []
    for updater in updaters:
        optimizer = updater.optimizer
        several = [optimizer]
        if isinstance(optimizer, MultiOptimizer):
            several = list(optimizer.optimizers.values())
        optimizers += [inner for inner in several if is_schedule_free(inner)]
    return optimizers


def tabulate_frozen(model: nn.Module) -> list[tuple[str, str, str, str]]:
    """Return a row of the table of groups for the parameters that no optimizer has, if any."""
    frozen = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    ]
    if frozen:
        names = join_first((name for name, _ in frozen), 3)
        return [
            (
                "frozen",
                str(len(frozen)),
                f"{sum(parameter.numel() for _, parameter in frozen):,}",
                names,
            )
        ]
    return []


def _length(facts: Mapping[str, Any]) -> RunLength:
    return RunLength(facts["updates"], facts["updates_per_epoch"], facts["batch_size"])


def _rule(rule: Any, where: str) -> tuple[list[str], Any]:
    """Return patterns and duration of a rule of MODEL.freeze_updates."""
    if not isinstance(rule, Mapping) or set(rule) != {"match", "for"}:
        if isinstance(rule, Mapping):
            rule = dict(rule)  # an AttrDict would show its class
        raise ConfigError(
            f"{where} = {rule!r}: expected `match`, patterns over names, and `for`, a number of "
            "updates or a duration, such as {match: trunk, for: 2 epochs}"
        )
    if isinstance(rule["match"], str):
        return [rule["match"]], rule["for"]
    return list(rule["match"]), rule["for"]


def _updates(where: str, duration: float | str, run: RunLength) -> int:
    """Return a duration in updates, rounded up; an integer without a unit counts updates."""
    if isinstance(duration, int) and not isinstance(duration, bool) and duration >= 0:
        return duration
    if not isinstance(duration, str):
        raise ConfigError(
            f"{where} = {duration!r}: expected a number of updates, or a duration such as '2 "
            "epochs'"
        )
    try:
        return ceil(run.fraction(where, duration) * run.updates - TOLERANCE)
    except ValueError as error:
        raise ConfigError(str(error)) from error
