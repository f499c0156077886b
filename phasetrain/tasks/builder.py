"""From sections to parts: the one place that reads DATA, MODEL, LOSS, METERS, OPTIMIZER and TASK."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.data import (
    COLLATES,
    DATASETS,
    SAMPLERS,
    TRANSFORMS,
    LoaderSettings,
    PhaseLoader,
    PhaseSampler,
    Reader,
    Sharded,
)
from phasetrain.data.datasets import Described, Samples
from phasetrain.data.sampler import Order
from phasetrain.data.transforms import Pipeline
from phasetrain.distributed import STRATEGIES, Ordered, Strategy, World, buffers_of
from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES, FunctionLoss
from phasetrain.machine import Machine, reseed_all, seed_of
from phasetrain.meters import METERS, Meter
from phasetrain.models import MODELS
from phasetrain.models.prepare import Compiled, CompileSettings, check_compilable, checkpoint_activations, synchronized
from phasetrain.models.sources import sources_of
from phasetrain.models.weights import Report, start_from
from phasetrain.optim import OPTIMIZERS, SCALERS, SCHEDULES, GuardSettings, Updater, fusable
from phasetrain.optim.groups import check_options, grouped, table, weights_of
from phasetrain.plan import TRAIN, Plan, Split
from phasetrain.registry import Registry, parameter_types, parameters
from phasetrain.tasks.base import TASKS, Parts, Task

DATA_KEYS = frozenset(
    {"dataset", "batch_size", "micro_batch_size", "workers", "drop_last", "sampler", "transforms", "collate"}
    | {"prefetch", "start_method", "timeout_seconds", "pin_memory", "on_bad_sample", "bad_sample_budget"}
)
"""Keys of a split that are the section's own; all others are parameters of the data set."""

DISTRIBUTED_KEYS = frozenset(
    {"strategy", "reduction", "virtual_shards", "sync_batch_norm", "communication", "timeout_seconds", "debug"}
)
"""Keys of DISTRIBUTED that are the section's own; all others are parameters of the strategy."""

MODEL_KEYS = frozenset({"name", "weights"})
"""Keys of MODEL that are the section's own; all others are parameters of the model."""

OPTIMIZER_KEYS = frozenset(
    {
        "name",
        "lr",
        "groups",
        "layer_decay",
        "accumulate",
        "clip_norm",
        "clip_value",
        "scaler",
        "on_nonfinite",
        "skip_budget",
        "SCHEDULES",
    }
)
"""Keys of OPTIMIZER that are the section's own; all others are parameters of the optimizer."""


@dataclass(frozen=True)
class SplitData:
    """The data of one split.

    Attributes:
        section: its config.
        reader: makes batches.
        order: order of the samples within a pass.
        length: samples.
        facts: what the data set knows of itself, the shape of an input taken after the transforms.
        train: whether it is the split that is learned from.
    """

    section: AttrDict
    reader: Reader
    order: Order
    length: int
    facts: Mapping[str, Any]
    train: bool = False

    def fingerprint(self) -> str:
        """Return a digest of the data: of its content where the data set can tell, else of its name and length."""
        if isinstance(self.reader.dataset, Described):
            return self.reader.dataset.fingerprint()
        return f"{self.section.dataset}:{self.length}"


class Builder:
    """Makes the parts of a run; override a `build_*` to make one of them another way.

    Args:
        config: the checked config.
        machine: where the run computes.
        world: its processes.
    """

    def __init__(self, config: AttrDict, machine: Machine, world: World) -> None:
        self.config = config
        self.machine = machine
        self.world = world
        self.seed: int = config.RUN.seed
        self.used: dict[str, Any] = {}
        self.groups: list[tuple[str, str, str, str]] = []

    def data(self) -> dict[str, SplitData]:
        """Return the data of every split, `train` first; opens data sets, reads no sample."""
        sections = self.config.DATA
        train = self.build_split(TRAIN, sections.TRAIN, {})
        names = {key: train.facts[key] for key in ("classes", "class_names") if key in train.facts}
        tests = {key.lower(): self.build_split(key.lower(), sections[key], names) for key in sections if key != "TRAIN"}
        return {TRAIN: train, **tests}

    def splits(self, data: Mapping[str, SplitData]) -> dict[str, Split]:
        """Return what the plan needs to know of each split."""
        return {
            name: Split(name, split.length, split.section.batch_size, split.section.drop_last)
            for name, split in data.items()
        }

    def parts(self, data: Mapping[str, SplitData], plan: Plan, *, train: bool = True, fresh: bool = True) -> Parts:
        """Return all parts; without `train`, those that a test needs.

        Args:
            data: of every split.
            plan: every phase.
            train: make what only training needs too.
            fresh: no checkpoint will be loaded, so training starts from MODEL.weights.
        """
        facts = self.facts(data, plan)
        built = self.build_model(facts)
        weights = self.load_weights(built) if train and fresh else None
        model, loss, forgetting = self.prepare(built, self.build_loss(facts), train=train)
        meters = {label: meter.to(self.machine.device) for label, meter in self.build_meters(facts).items()}
        strategy = self.build_strategy()
        strategy.prepare(model, loss)
        updater = self.build_updater(model, loss, facts, strategy) if train else None
        return Parts(
            model=model,
            loss=loss,
            meters=meters,
            updater=updater,
            loaders={name: self.build_loader(split, plan) for name, split in data.items()},
            machine=self.machine,
            world=self.world,
            seed=self.seed,
            facts=dict(self.used),
            train_meters=self.config.PHASES.train_meters,
            groups=self.groups,
            strategy=strategy,
            network=self.compiled(strategy.wrap(model, updater.optimizer), model, forgetting) if updater else None,
            criterion=strategy.wrap(loss, updater.optimizer) if updater else None,
            weights=weights.plain() if weights else None,
        )

    def task(self, parts: Parts) -> Task:
        """Return the task that TASK names."""
        section = self.config.TASK
        return TASKS.build(section.name, _rest(section, {"name"}), facts={"parts": parts})

    def facts(self, data: Mapping[str, SplitData], plan: Plan) -> dict[str, Any]:
        """Return what parts may ask for by name, known only now that the data and the plan are."""
        train = data[TRAIN]
        tests = [split for name, split in data.items() if name != TRAIN]
        batch_size = train.section.batch_size
        per_epoch = [phase for phase in plan.phases if phase.is_train and phase.epoch == 0]
        return {
            **train.facts,
            "train_samples": train.length,
            "test_samples": sum(split.length for split in tests),
            "batch_size": batch_size,
            "epochs": plan.epochs,
            "updates": plan.updates,
            "updates_per_epoch": per_epoch[0].end / batch_size if per_epoch else 0.0,
            "train_batches": plan.updates,
            "test_batches": sum(phase.steps for phase in plan.phases if not phase.is_train),
            "world": self.world.size,
            "device": self.machine.device,
            "precision": self.machine.precision,
        }

    def prepare(self, model: nn.Module, loss: nn.Module, *, train: bool) -> tuple[nn.Module, nn.Module, list[str]]:
        """Return model and loss as the strategy takes them, and which modules compute their activations twice.

        The order is fixed: device, SyncBatchNorm, activation checkpointing; then come the strategy, the optimizer,
        the strategy's wrapper and compilation. Parameters that do not require a gradient stay so.
        """
        model.to(self.machine.device)
        loss.to(self.machine.device)
        if self.config.DISTRIBUTED.sync_batch_norm and not self.world.is_alone:
            model, loss = synchronized(model), synchronized(loss)
        rules = self.config.MACHINE.activation_checkpointing
        return model, loss, checkpoint_activations(model, rules) if train and rules else []

    def compiled(self, network: nn.Module, model: nn.Module, forgetting: list[str]) -> nn.Module:
        """Return what is called in training: the network as the strategy wraps it, compiled where that is asked for."""
        section = self.config.MACHINE.compile
        if section is None:
            return network
        settings = CompileSettings(**section)
        check_compilable(model, forgetting, settings)
        return Compiled(network, settings)

    def build_split(self, name: str, section: AttrDict, facts: Mapping[str, Any]) -> SplitData:
        """Return the data of one split.

        Raises:
            ConfigError: the data set, a transform, the sampler or the collate function cannot be made.
        """
        where = f"DATA.{name.upper()}"
        reseed_all(
            seed_of(self.seed, "init", "data")
        )  # the same for all splits, so that random ones complete each other
        part = "train" if name == TRAIN else "test"  # a data set that has both gives the one that fits, unless told
        dataset: Samples = DATASETS.build(
            section.dataset,
            _rest(section, DATA_KEYS),
            where=where,
            facts={**facts, "split": part, "part": part},
            used=self.used,
        )
        transforms = [
            self._named(TRANSFORMS, item, f"{where}.transforms[{i}]") for i, item in enumerate(section.transforms)
        ]
        pipeline = Pipeline(transforms)
        collate = self._named(COLLATES, section.collate, f"{where}.collate")
        reader = Reader(dataset, pipeline, collate, seed=self.seed, on_bad_sample=section.on_bad_sample)
        size: dict[str, Any] = {"batch_size": section.batch_size}
        sharded = {"shard_lengths": dataset.shard_lengths} if isinstance(dataset, Sharded) else {}
        order = self._named(SAMPLERS, section.sampler, f"{where}.sampler", size | sharded)
        known = dict(dataset.facts()) if isinstance(dataset, Described) else {}
        if "input_shape" in known:
            shape = _shape_after(pipeline, known.pop("input_shape"), f"{where}.transforms")
            known |= {} if shape is None else {"input_shape": shape}
        return SplitData(section, reader, order, len(dataset), known, train=name == TRAIN)

    def build_loader(self, split: SplitData, plan: Plan) -> PhaseLoader:
        """Return the batches of one split."""
        section = split.section
        micro = section.micro_batch_size or section.batch_size
        fixed = split.train and self.config.DISTRIBUTED.reduction == "ordered"
        sampler = PhaseSampler(
            split.order, split.length, seed=self.seed, micro_batch_size=micro, world=self.world, fixed=fixed
        )
        folder = self.config.RUN.dir
        settings = LoaderSettings(
            workers=section.workers,
            prefetch=section.prefetch,
            start_method=section.start_method,
            timeout_seconds=section.timeout_seconds,
            pin_memory=section.pin_memory,
            bad_sample_budget=section.bad_sample_budget,
            stacks=None if "://" in folder else f"{folder}/stacks.txt",
        )
        return PhaseLoader(split.reader, sampler, plan, settings)

    def build_model(self, facts: Mapping[str, Any]) -> nn.Module:
        """Return the model, its weights drawn from the run's seed."""
        reseed_all(seed_of(self.seed, "init", "model"))
        section = self.config.MODEL
        model = MODELS.build(section.name, _rest(section, MODEL_KEYS), facts=facts, used=self.used)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"MODEL.name = {section.name!r} gave {type(model).__name__}, expected a torch.nn.Module")
        return model

    def load_weights(self, model: nn.Module) -> Report | None:
        """Give a fresh model the weights that MODEL.weights names; every process takes part."""
        sources = sources_of(self.config.MODEL.weights)
        return start_from(model, sources, self.world) if sources else None

    def build_loss(self, facts: Mapping[str, Any]) -> nn.Module:
        """Return the loss as a module; a plain function is wrapped in one."""
        reseed_all(seed_of(self.seed, "init", "loss"))
        section = self.config.LOSS
        params = _rest(section, {"name"})
        factory = LOSSES.find(section.name)
        tensors = [key for key, hint in parameter_types(factory).items() if _takes_tensor(hint)]
        params |= {
            key: torch.tensor(params[key], dtype=torch.float32) for key in tensors if params.get(key) is not None
        }
        if not isinstance(factory, type) and list(parameters(factory))[1:2] == ["target"]:  # loss(output, target, ...)
            return FunctionLoss(factory, params)
        loss = LOSSES.build(section.name, params, facts=facts, used=self.used)
        return loss if isinstance(loss, nn.Module) else FunctionLoss(loss, {})

    def build_meters(self, facts: Mapping[str, Any]) -> dict[str, Meter]:
        """Return the meters by label, in the order of their keys."""

        def build(label: str, section: AttrDict) -> Meter:
            name, params = section.get("name", label), _rest(section, {"name"})
            return METERS.build(name, params, where=f"METERS.{label}", facts=facts, used=self.used)

        return {label: build(label, section) for label, section in self.config.METERS.items()}

    def build_strategy(self) -> Strategy:
        """Return how the processes share an update; a process that has joined no group trains alone."""
        section = self.config.DISTRIBUTED
        if section.reduction == "ordered":
            if section.strategy not in ("none", "ddp"):
                raise ConfigError(
                    f"DISTRIBUTED.reduction = 'ordered' and DISTRIBUTED.strategy = {section.strategy!r}: it adds "
                    "gradients itself, which only the strategies none and ddp leave to it; take one of them"
                )
            return Ordered(self.world, section.virtual_shards)
        if self.world.control is None:
            return Strategy(self.world)
        params = _rest(section, DISTRIBUTED_KEYS)
        facts = {"world": self.world, "communication": section.communication, "precision": self.machine.precision}
        if section.communication != "none" and "communication" not in parameters(STRATEGIES.find(section.strategy)):
            raise ConfigError(
                f"DISTRIBUTED.communication = {section.communication!r} and DISTRIBUTED.strategy = "
                f"{section.strategy!r}: it has no such choice; take DISTRIBUTED.communication=none, or the strategy ddp"
            )
        return STRATEGIES.build(section.strategy, params, where="DISTRIBUTED", facts=facts)

    def build_updater(
        self, model: nn.Module, loss: nn.Module, facts: Mapping[str, Any], strategy: Strategy | None = None
    ) -> Updater:
        """Return the updater over all parameters of model and loss that require a gradient."""
        strategy = strategy or Strategy(self.world)
        section = self.config.OPTIMIZER
        trained = weights_of(model, loss)
        if not trained:
            raise ConfigError(f"MODEL.name = {self.config.MODEL.name!r} has no parameter to train")
        params = _rest(section, OPTIMIZER_KEYS)
        shards = {"shards": strategy.shards}
        scaler = self._named(SCALERS, section.scaler, "OPTIMIZER.scaler", {**facts, **shards})
        own: dict[str, Any] = {"lr": section.lr}
        if "fused" not in params:
            own["fused"] = fusable(section.name, params, scaled=scaler is not None)
        used: dict[str, Any] = {}

        groups = grouped(trained, section.groups, lr=section.lr, layer_decay=section.layer_decay)

        def make(given: list[dict[str, Any]]) -> torch.optim.Optimizer:
            made = OPTIMIZERS.build(section.name, params, facts={**facts, **own, "params": given}, used=used)
            check_options(groups, made)
            return made

        optimizer = strategy.optimizer(make, [group.as_given() for group in groups])
        self.groups = list(table(groups)) if len(groups) > 1 else []
        self.used |= {key: value for key, value in used.items() if not key.endswith((".params", ".lr"))}
        schedules = {
            option: self._named(SCHEDULES, item, f"OPTIMIZER.SCHEDULES.{option}", facts)
            for option, item in section.SCHEDULES.items()
        }
        return Updater(
            optimizer,
            scaler=scaler,
            schedules=schedules,
            clip_norm=section.clip_norm,
            clip_value=section.clip_value,
            guard=GuardSettings(
                section.on_nonfinite,
                section.skip_budget,
                names=[weight.name for group in groups for weight in group.weights],
                buffers=buffers_of(model, loss),
            ),
            strategy=strategy,
        )

    def _named(self, registry: Registry[Any], item: Any, where: str, facts: Mapping[str, Any] | None = None) -> Any:
        """Build what is written as a bare name or as a mapping with `name` and parameters."""
        if isinstance(item, str):
            return registry.build(item, {}, where=where, facts=facts)
        return registry.build(item["name"], _rest(item, {"name"}), where=where, facts=facts)


def _rest(section: Mapping[str, Any], own: frozenset[str] | set[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in own}


def _takes_tensor(hint: Any) -> bool:
    return torch.Tensor in (hint, *get_args(hint))


def _shape_after(pipeline: Pipeline, shape: tuple[int, ...], where: str) -> tuple[int, ...] | None:
    try:
        return pipeline.shape_after(shape)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ConfigError(f"{where} do not fit the inputs of the data set, of shape {shape}: {error}") from error
