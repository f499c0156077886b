"""Builds all parts of a run from the sections DATA, MODEL, LOSS, METERS, OPTIMIZER and TASK."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, nan
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.objects import is_object_name
from phasetrain.config.registry import list_required, parameter_types, parameters
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.reader import SampleReader
from phasetrain.data.loading.seed_check import read_first_shape
from phasetrain.distributed import Strategy, World
from phasetrain.engine.plan import TRAIN, Plan, Stage
from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES, FunctionLoss, find_ignore_index
from phasetrain.meters import METERS, Meter
from phasetrain.models import MODELS, Embedding
from phasetrain.models.excluded import ExcludedTensors
from phasetrain.models.prepare import (
    CompiledModel,
    CompileSettings,
    check_compilable,
    checkpoint_activations,
    convert_sync_batchnorm,
    copy_expanded_buffers,
    require_shapes,
    spread_mapping,
)
from phasetrain.models.sources import parse_sources
from phasetrain.optim import Updater
from phasetrain.optim.multi_optimizer import MAIN
from phasetrain.runtime.machine import Machine, reseed_all, seed_of
from phasetrain.tasks.base import TASKS, Task, makes_several_passes
from phasetrain.tasks.build.batch_transform_builder import build_batch_transforms
from phasetrain.tasks.build.coupling import check_counted, check_coupled
from phasetrain.tasks.build.data_builder import (
    SplitData,
    build_data,
    build_loader,
    build_plan,
    build_stages,
)
from phasetrain.tasks.build.optimizer_builder import build_strategy, build_updaters, tabulate_groups
from phasetrain.tasks.build.sections import METER_KEYS, MODEL_KEYS, BuildContext, parameters_of
from phasetrain.tasks.build.weights_builder import (
    build_averages,
    build_freeze_schedule,
    copy_for_averages,
    find_excluded,
    freeze_parameters,
)
from phasetrain.tasks.parts import MAIN_UPDATER, OutputChoice, Parts

if TYPE_CHECKING:
    from phasetrain.models.weights import LoadReport

log = logging.getLogger(__name__)


class Builder:
    """Builds the parts of a run from its config, step by step.

    A subclass may override `facts` and `build_strategy`; other parts are replaced by registering
    them.

    Args:
        config: the validated config.
        machine: device and precision.
        world: ranks of the run.
        stages: the config in each stage of PHASES.stages.

    Example:
        >>> data = builder.data()
        >>> plan = builder.plan(data)
        >>> task = builder.task(builder.parts(data, plan))
    """

    def __init__(
        self, config: AttrDict, machine: Machine, world: World, stages: Sequence[AttrDict] = ()
    ) -> None:
        self.context = BuildContext(config, machine, world, tuple(stages))

    def data(self) -> dict[str, SplitData]:
        """Return the data of every split, `train` first; opens datasets, but reads no sample."""
        return build_data(self.context)

    def stages(self, data: Mapping[str, SplitData]) -> tuple[Stage, ...]:
        """Return the stages of the plan."""
        return build_stages(self.context, data)

    def plan(self, data: Mapping[str, SplitData]) -> Plan:
        """Return all phases of a run from its beginning."""
        return build_plan(self.context, data)

    def facts(self, data: Mapping[str, SplitData], plan: Plan) -> dict[str, Any]:
        """Return the values that parts may ask for by name."""
        return collect_facts(self.context, data, plan)

    def build_strategy(self) -> Strategy:
        """Return how ranks share an update."""
        return build_strategy(self.context)

    def parts(
        self,
        data: Mapping[str, SplitData],
        plan: Plan,
        *,
        train: bool = True,
        fresh: bool | None = None,
    ) -> Parts:
        """Return all parts, or without `train` those that a test needs.

        Args:
            data: data of every split.
            plan: all phases.
            train: build the updater and all that only training needs.
            fresh: load MODEL.weights, because no checkpoint will be loaded, or only one that leaves
                out tensors; by default if the parts train.
        """
        if fresh is None:
            fresh = train
        facts = self.facts(data, plan)
        strategy = self.build_strategy()
        return build_parts(self.context, data, plan, facts, strategy, train=train, fresh=fresh)

    def task(self, parts: Parts) -> Task:
        """Return the task that TASK names.

        Raises:
            ConfigError: a custom task leaves parts that every task has out of checkpoints.
        """
        section = self.context.config.TASK
        model_factory = partial(
            make_model, self.context, facts=parts.known_facts, loads_weights=True
        )
        facts = {
            key.removeprefix("TASK."): value
            for key, value in parts.facts.items()
            if key.startswith("TASK.")
        }
        facts |= {"parts": parts, "make_model": model_factory}
        task = TASKS.build(section.name, parameters_of(section, {"name"}), facts=facts)
        missing = [part for part in Task.stateful(task) if part not in task.stateful()]
        if missing:
            raise ConfigError(
                f"TASK.name = {section.name!r}: {type(task).__qualname__}.stateful() leaves out "
                f"{', '.join(missing)}, which every checkpoint needs; return also what the base "
                "class returns: return {**super().stateful(), ...}",
                code="task.missing_state",
            )
        return task


def build_parts(
    context: BuildContext,
    data: Mapping[str, SplitData],
    plan: Plan,
    facts: dict[str, Any],
    strategy: Strategy,
    *,
    train: bool,
    fresh: bool,
) -> Parts:
    """Return all parts, see `Builder.parts`.

    Args:
        context: config, machine and world.
        data: data of every split.
        plan: all phases.
        facts: values that parts may ask for by name; the model may add some.
        strategy: how ranks share an update.
        train: build the updater and all that only training needs.
        fresh: load MODEL.weights.
    """
    built = build_model(context, facts)
    if isinstance(built, Embedding):
        facts = facts | {"dimensions": built.dimensions}
    weights = None
    if fresh:
        weights = load_weights(context, built)
    model, loss, checkpointed = prepare_modules(
        context, built, build_loss(context, facts), train=train
    )
    if train:
        check_coupled(loss, context.stage_configs, context.world, train=True)
        check_counted(loss, context.stage_configs, context.world)
    # Before the strategy shards the weights in place: afterwards a rank could copy only its shard.
    copies = copy_for_averages(context, model)
    # Before the optimizer: a sharding strategy replaces the parameters, and the optimizer must get
    # the ones that will be trained.
    strategy.prepare(model, loss)
    others: dict[str, Updater] = {}
    updater = None
    updaters: list[Updater] = []
    excluded = None
    if train:
        names = find_excluded(context, model, strategy)
        excluded = ExcludedTensors(model, names) if names else None
        others = build_updaters(
            context,
            model,
            loss,
            # In a new cycle, durations such as `warmup: 2 epochs` are parts of the cycle.
            facts | {"updates": plan.cycle_updates},
            strategy,
            collect_stage_facts(context, plan),
        )
        updaters = list(others.values())
        updater = _take_main(others)
    losses = build_stage_losses(context, loss, facts)
    meters = {
        label: meter.to(context.machine.device)
        for label, meter in build_meters(context, facts, losses or [loss]).items()
    }
    loaders = {name: build_loader(context, split, plan) for name, split in data.items()}
    groups: list[tuple[str, str, str, str]] = []
    train_model = None
    train_loss = None
    if updater is not None:
        groups = tabulate_groups(context, model, loss, facts)
        # After the optimizer, which some wrappers need; compiled last, so that the compiler sees
        # the hooks of the wrapper and of activation checkpointing.
        if makes_several_passes(TASKS.find(context.config.TASK.name, "TASK.name")):
            strategy.reduce_after_passes()
        train_model = strategy.wrap_module(model, updater.optimizer)
        if (section := context.config.MACHINE.compile) is not None:
            settings = CompileSettings(**section)
            check_compilable(model, checkpointed, settings)
            train_model = CompiledModel(train_model, settings)
        train_loss = strategy.wrap_module(loss, updater.optimizer)
    task = context.config.TASK
    # A default wins over a fact: runs of earlier releases were trained with it.
    for name in list_required(TASKS.find(task.name, "TASK.name")):
        if name in facts and name not in task:
            context.used[f"TASK.{name}"] = facts[name]
    return Parts(
        model=model,
        loss=loss,
        meters=meters,
        choices=choose_outputs(context),
        updater=updater,
        loaders=loaders,
        machine=context.machine,
        world=context.world,
        seed=context.seed,
        facts=context.list_facts(),
        train_meters=context.config.PHASES.train_meters,
        groups=groups,
        strategy=strategy,
        train_model=train_model,
        train_loss=train_loss,
        losses=losses,
        weights=weights.to_dict() if weights else None,
        batch_transforms=build_batch_transforms(context, losses or [loss], facts) if train else (),
        freeze_schedule=build_freeze_schedule(context, model, loss, strategy, facts)
        if train
        else None,
        averages=build_averages(context, model, copies, strategy, facts, updaters),
        other_updaters=others,
        known_facts=facts,
        excluded=excluded,
        config=context.config,
    )


def _take_main(updaters: dict[str, Updater]) -> Updater:
    """Remove and return the updater of OPTIMIZER itself, after a check of the other labels."""
    updater = updaters.pop(MAIN)
    if MAIN_UPDATER in updaters:
        raise ConfigError(
            f"OPTIMIZER.others.{MAIN_UPDATER}: a task with separate updaters has this name for the "
            "updater of OPTIMIZER itself; choose another label",
            code="config.conflict",
        )
    return updater


def collect_facts(
    context: BuildContext, data: Mapping[str, SplitData], plan: Plan
) -> dict[str, Any]:
    """Return the values that parts may ask for by name; they depend on the data and the plan."""
    tests = [split for name, split in data.items() if name != TRAIN]
    # A test without training data asks the first test split, such as for the number of classes.
    described = data.get(TRAIN) or tests[0]
    train_samples = data[TRAIN].length if TRAIN in data else 0
    per_epoch = set(list_updates_per_epoch(plan))
    return {
        **described.facts,
        **_measure_input(context, described),
        "train_samples": train_samples,
        "test_samples": sum(split.length for split in tests),
        "batch_size": context.config.DATA.TRAIN.batch_size,
        "epochs": plan.epochs,
        "updates": plan.updates,
        # One number only if all stages agree; NaN makes a schedule in epochs fail, not guess.
        "updates_per_epoch": per_epoch.pop() if len(per_epoch) == 1 else nan,
        "train_batches": plan.updates,
        "test_batches": int(plan.phases.column("steps")[~plan.phases.is_train].sum()),
        "world": context.world.size,
        "device": context.machine.device,
        "precision": context.machine.precision,
    }


def _measure_input(context: BuildContext, split: SplitData) -> dict[str, Any]:
    """Return the facts `input_shape` and `channels` as the first sample has them, if the model
    requires one that neither the config nor the dataset gives."""
    section = context.config.MODEL
    if not isinstance(section.get("name"), str):
        return {}
    try:
        required = list_required(MODELS.find(section.name, "MODEL.name"))
    except ConfigError as error:  # raised again when the model is built
        log.debug("the input is not measured: %s", error)
        return {}
    wanted = {"input_shape", "channels"} & set(required) - section.keys() - split.facts.keys()
    shape = measure_sample(split) if wanted else None
    if shape is None:
        return {}
    measured: dict[str, Any] = {"input_shape": shape}
    if len(shape) == 3:
        measured["channels"] = shape[0]
    return {key: measured[key] for key in wanted & measured.keys()}


def measure_sample(split: SplitData) -> tuple[int, ...] | None:
    """Return the shape of the transformed input of the first sample of a split; None if it is no
    array, or samples need not have a common shape.

    Raises:
        SampleError: the sample cannot be read.
    """
    reader = _find_reader(split)
    # Padded samples have no common shape.
    if reader is None or split.section.collate != "stack":
        return None
    return read_first_shape(reader)


def measure_rank(split: SplitData) -> int | None:
    """Return the number of dimensions of the input of the first sample of a split, before the
    transforms; None if it is no array.

    Raises:
        SampleError: the sample cannot be read.
    """
    reader = _find_reader(split)
    if reader is None:
        return None
    shape = read_first_shape(reader.with_pipeline(reader.pipeline.replace_transforms(())))
    return None if shape is None else len(shape)


def _find_reader(split: SplitData) -> SampleReader | None:
    """Return the reader of a split whose samples can be read before the training; None if there is
    none, since a pass over an iterable begins with the training."""
    reader = split.reader
    if (
        split.loader is not None
        or not isinstance(reader, SampleReader)
        or isinstance(reader.dataset, ForwardDataset)
    ):
        return None
    return reader


def collect_stage_facts(context: BuildContext, plan: Plan) -> list[dict[str, Any]]:
    """Return for each stage the values that its schedules may ask for by name."""
    return [
        {
            "batch_size": config.DATA.TRAIN.batch_size,
            "updates": stage.updates,
            "updates_per_epoch": per_epoch,
        }
        for config, stage, per_epoch in zip(
            context.stages, plan.stages, list_updates_per_epoch(plan), strict=False
        )
    ]


def build_stage_losses(
    context: BuildContext, loss: nn.Module, facts: Mapping[str, Any]
) -> list[nn.Module]:
    """Return the loss of each stage; empty if the loss is the same in the whole run.

    Raises:
        ConfigError: a stage has another loss, and one of the losses has state, which would be lost.
    """
    if all(config.LOSS == context.config.LOSS for config in context.stages):
        return []
    losses = []
    for number, config in enumerate(context.stages):
        same = config.LOSS == context.config.LOSS
        stage_loss = loss
        if not same:
            stage_loss = build_loss(context, facts, config.LOSS).to(context.machine.device)
        losses.append(stage_loss)
        if stage_loss.state_dict() or (not same and loss.state_dict()):
            raise ConfigError(
                f"PHASES.stages[{number}].LOSS: the loss {config.LOSS.name!r} has weights or "
                "buffers of its own, which would be lost between stages; only a loss without "
                "state may change during a run"
            )
    return losses


def prepare_modules(
    context: BuildContext, model: nn.Module, loss: nn.Module, *, train: bool
) -> tuple[nn.Module, nn.Module, list[str]]:
    """Return model and loss as the strategy takes them, and the names of the modules with
    activation checkpointing.

    The order is fixed: device, SyncBatchNorm, freezing, activation checkpointing; then come
    copies for averages, the strategy, the optimizer, the strategy's wrapper and compilation.
    Parameters that do not require a gradient keep it that way.
    """
    copy_expanded_buffers(model)
    copy_expanded_buffers(loss)
    # Before all else: an optimizer or a copy made on the CPU would refer to other tensors.
    model.to(context.machine.device)
    loss.to(context.machine.device)
    if context.config.MACHINE.channels_last:
        # A convolution takes the layout from its weights, so inputs need no conversion.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    over = context.config.DISTRIBUTED.sync_batch_norm
    if over and not context.world.is_single_process:
        from phasetrain.distributed.subgroups import partition, subgroup

        group = subgroup(context.world, partition(context.world, over))
        # This replaces modules, so it comes before anything that holds on to one: freezing,
        # checkpointing, copies, the wrapper.
        model = convert_sync_batchnorm(model, group)
        loss = convert_sync_batchnorm(loss, group)
    if train:
        freeze_parameters(context, model, loss)
    rules = context.config.MACHINE.activation_checkpointing
    checkpointed: list[str] = []
    if train and rules:
        checkpointed = checkpoint_activations(model, rules)
    return model, loss, checkpointed


def build_model(context: BuildContext, facts: Mapping[str, Any]) -> nn.Module:
    """Return the model, its weights drawn from the run's seed."""
    # A seed for each kind of part, so that another loss or dataset leaves the initial weights
    # alone.
    reseed_all(seed_of(context.seed, "init", "model"))
    model = make_model(
        context, parameters_of(context.config.MODEL, MODEL_KEYS - {"name"}), "MODEL", facts=facts
    )
    require_shapes(model, "MODEL")
    if context.config.MODEL.inputs_by_name:
        # A hook of the module and not of the task, so that the model is called in the same way by
        # predictions, exports and the counting of operations.
        model.register_forward_pre_hook(spread_mapping, with_kwargs=True)
    _share_initial_state(context, context.config.MODEL.name, model)
    if (section := context.config.MODEL.adapters) is not None:
        from phasetrain.models.adapters import attach_adapters

        attach_adapters(model, section, partial(seed_of, context.seed, "init", "adapter"))
    return model


def _share_initial_state(context: BuildContext, name: str, module: nn.Module) -> nn.Module:
    """Give all ranks the state of rank 0 if the module is an object of Python: each rank has drawn
    its weights by itself."""
    if is_object_name(name) and not context.world.is_single_process:
        module.load_state_dict(context.world.broadcast(module.state_dict()))
    return module


def make_model(
    context: BuildContext,
    section: Mapping[str, Any],
    where: str,
    own: Mapping[str, Any] = MappingProxyType({}),
    *,
    facts: Mapping[str, Any],
    loads_weights: bool = False,
) -> nn.Module:
    """Return a model that a section of the config describes, its weights drawn from the global
    generators.

    Args:
        section: its name and parameters.
        where: config path, for messages.
        own: values that it may ask for by name instead of the facts of the run.
        facts: facts of the run.
        loads_weights: load the weights that the key `weights` of the section names, if any.

    Raises:
        ConfigError: there is no such model, it cannot be made, its weights cannot be loaded, or
            its state is more than tensors.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ConfigError(
            f"{where} = {section!r}: expected a mapping with the `name` of a model and its "
            "parameters"
        )
    values = {**facts, **own, "make_model": partial(make_model, context, facts=facts)}
    name = section["name"]
    params = parameters_of(section, {"name", "weights"} if loads_weights else {"name"})
    model = MODELS.build(name, params, where=where, facts=values, used=context.used)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{where}.name = {name!r} gave {type(model).__name__}, expected a torch.nn.Module"
        )
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{where}.name = {name!r}: {key} in its state is of type {type(value).__name__}, "
                "and only tensors are saved, averaged and compared; register a buffer instead, or "
                "return a tensor from get_extra_state"
            )
    if loads_weights:
        load_weights(context, model, section, where)
    return model


def load_weights(
    context: BuildContext,
    model: nn.Module,
    section: Mapping[str, Any] | None = None,
    where: str = "MODEL",
) -> "LoadReport | None":
    """Load the weights that the key `weights` of a section names into a new model; a collective
    call.

    Args:
        context: config, machine and world.
        model: the model.
        section: its section of the config; None for MODEL.
        where: config path of the section.
    """
    key = f"{where}.weights"
    sources = parse_sources((section or context.config.MODEL).get("weights"), key)
    if not sources:
        return None
    from phasetrain.models.weights import load_pretrained

    report = load_pretrained(model, sources, context.world, logs=key not in context.logged)
    context.logged.add(key)
    return report


def build_loss(
    context: BuildContext, facts: Mapping[str, Any], section: AttrDict | None = None
) -> nn.Module:
    """Return the loss as a module; a plain function is wrapped in one."""
    reseed_all(seed_of(context.seed, "init", "loss"))
    section = section or context.config.LOSS
    loss = make_loss(context, section, "LOSS", facts)
    return _share_initial_state(context, section.name, loss)


def make_loss(
    context: BuildContext, section: Mapping[str, Any], where: str, facts: Mapping[str, Any]
) -> nn.Module:
    """Return the loss that a section of the config describes, see `make_model`."""
    params = parameters_of(section, {"name"})
    name = section["name"]
    factory = LOSSES.find(name, f"{where}.name")
    values = {
        **facts,
        "make_loss": partial(make_loss, context, facts=facts),
        "world": context.world,
    }
    # YAML and plan.json have no tensors: class weights are written as lists.
    for given in (params, values):
        given |= {
            key: torch.tensor(given[key], dtype=torch.float32)
            for key, hint in parameter_types(factory).items()
            if Tensor in (hint, *get_args(hint))
            and isinstance(given.get(key), list | tuple | float | int)
        }
    # A function loss(output, target, ...) and not a factory of one.
    if not isinstance(factory, type) and list(parameters(factory))[1:2] == ["target"]:
        return FunctionLoss(factory, params)
    unset = [key for key in list_required(factory) if key not in params | values]
    if not isinstance(factory, type) and len(unset) == 2:
        raise ConfigError(
            f"{where}.name = {name!r}: its parameters {' and '.join(unset)} have no value; if it "
            "computes the loss, rename them to `output, target`, and if it returns a loss, set "
            f"{' and '.join(f'{where}.{key}' for key in unset)}"
        )
    loss = LOSSES.build(name, params, where=where, facts=values, used=context.used)
    _check_class_weights(loss, where, facts)
    # With `sum`, the gradient of an update would depend on how its batch is cut into micro-batches.
    if isinstance(loss, _Loss) and loss.reduction not in ("mean", "batchmean"):
        raise ConfigError(
            f"{where}.reduction = {loss.reduction!r}: an update is a weighted mean over samples; "
            "leave reduction out (its default is mean), and scale with OPTIMIZER.lr"
        )
    if isinstance(loss, nn.Module):
        return loss
    return FunctionLoss(loss, {})


def build_meters(
    context: BuildContext, facts: Mapping[str, Any], losses: Sequence[nn.Module] = ()
) -> dict[str, Meter]:
    """Return the meters by label, in the order of their keys.

    Args:
        context: config, machine and world.
        facts: values that parts may ask for by name.
        losses: the loss of each stage; meters skip the targets that they ignore.
    """
    meters = {}
    for label, section in context.config.METERS.items():
        ignored = find_ignore_index(losses, section.get("target"))
        meter_facts = facts if ignored is None else {**facts, "ignore_index": ignored}
        meters[label] = build_meter(label, section, meter_facts, context.used)
    return meters


def build_meter(
    label: str,
    section: Mapping[str, Any],
    facts: Mapping[str, Any],
    used: dict[str, Any] | None = None,
) -> Meter:
    """Return the meter of one entry of METERS; `used` gets the facts that it was given."""
    name = section.get("name", label)
    params = parameters_of(section, {"name", *METER_KEYS})
    meter = METERS.build(name, params, where=f"METERS.{label}", facts=facts, used=used)
    if section.get("splits") is not None:
        meter.splits = frozenset(split.lower() for split in section["splits"])
    return meter


def choose_outputs(context: BuildContext) -> dict[str, OutputChoice]:
    """Return label -> which output and target the meter gets, for meters that do not get all."""
    return {
        label: OutputChoice(f"METERS.{label}", section.get("output"), section.get("target"))
        for label, section in context.config.METERS.items()
        if {"output", "target"} & section.keys()
    }


def list_updates_per_epoch(plan: Plan) -> list[float]:
    """Return the updates per pass over the training data in each stage, with the one of a short
    last batch; 0.0 for a stage without train phases."""
    updates = [0.0] * len(plan.stages)
    # Backwards, so that the first pass of a stage counts: a later one may be shorter.
    for phase, _ in reversed(plan.phases.kinds):
        # A pass that began with batches of another size counts only if there is no other.
        is_aligned = phase.offset == phase.first * phase.batch_size
        if phase.is_train and (is_aligned or not updates[phase.stage]):
            updates[phase.stage] = float(ceil(phase.end / phase.batch_size))
    return updates


def _check_class_weights(loss: Any, where: str, facts: Mapping[str, Any]) -> None:
    """Reject a loss of torch whose class weights are not as many as there are classes."""
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss.weight is None:
        return
    classes = facts.get("classes")
    if isinstance(classes, int) and len(loss.weight) != classes:
        raise ConfigError(
            f"{where}.weight: it has {len(loss.weight)} entries, and the data has {classes} "
            "classes; give one weight for each class",
            code="loss.class_weights",
        )
