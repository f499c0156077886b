"""From sections to parts: the one place that reads DATA, MODEL, LOSS, METERS, OPTIMIZER and
TASK."""

from collections.abc import Mapping
from functools import partial
from math import nan
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import parameter_types, parameters
from phasetrain.distributed.subgroups import partition, subgroup
from phasetrain.engine.plan import TRAIN, Plan
from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES, FunctionLoss
from phasetrain.meters import METERS, Meter
from phasetrain.models import MODELS, Embedding
from phasetrain.models.prepare import (
    Compiled,
    CompileSettings,
    check_compilable,
    checkpoint_activations,
    synchronized,
)
from phasetrain.models.sources import sources_of
from phasetrain.models.weights import Report, start_from
from phasetrain.optim import Updater
from phasetrain.optim.multi_optimizer import MAIN
from phasetrain.runtime.machine import reseed_all, seed_of
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.build.batch_transform_builder import PairBuilder
from phasetrain.tasks.build.coupling import check_counted, check_coupled
from phasetrain.tasks.build.data_builder import DataBuilder, SplitData
from phasetrain.tasks.build.optimizer_builder import OptimizerBuilder
from phasetrain.tasks.build.sections import METER_KEYS, MODEL_KEYS, rest
from phasetrain.tasks.parts import OutputChoice, Parts


class Builder(DataBuilder, PairBuilder, OptimizerBuilder):
    """Makes the parts of a run; override a `build_*` to make one of them another way.

    Args:
        config: the checked config.
        machine: where the run computes.
        world: its processes.
        stages: the config as it is in each stage of PHASES.stages.
    """

    _known: Mapping[str, Any] = MappingProxyType({})

    def parts(
        self, data: Mapping[str, SplitData], plan: Plan, *, train: bool = True, fresh: bool = True
    ) -> Parts:
        """Return all parts; without `train`, those that a test needs.

        Args:
            data: of every split.
            plan: every phase.
            train: make what only training needs too.
            fresh: no checkpoint will be loaded, so training starts from MODEL.weights.
        """
        self._known = facts = self.facts(data, plan)
        built = self.build_model(facts)
        facts |= {"dimensions": built.dimensions} if isinstance(built, Embedding) else {}
        weights = self.load_weights(built) if train and fresh else None
        model, loss, forgetting = self.prepare(built, self.build_loss(facts), train=train)
        meters = {
            label: meter.to(self.machine.device)
            for label, meter in self.build_meters(facts).items()
        }
        if train:
            check_coupled(loss, self.stage_configs or (self.config,), self.world)
            check_counted(loss, self.stage_configs or (self.config,), self.world)
        strategy = self.build_strategy()
        copies = self.copies(model)
        strategy.prepare(model, loss)
        others: dict[str, Updater] = {}
        updater = None
        if train:
            others = self.build_updaters(
                model,
                loss,
                facts,
                strategy,
                self.stage_facts(plan),
                separate=_has_separate_updaters(self.config.TASK.name),
            )
            updater = others.pop(MAIN)
        losses = self.stage_losses(loss, facts)
        return Parts(
            model=model,
            loss=loss,
            meters=meters,
            choices=self.choices(),
            updater=updater,
            loaders={name: self.build_loader(split, plan) for name, split in data.items()},
            machine=self.machine,
            world=self.world,
            seed=self.seed,
            facts=dict(self.used),
            train_meters=self.config.PHASES.train_meters,
            groups=self.groups,
            strategy=strategy,
            network=self.compiled(strategy.wrap_module(model, updater.optimizer), model, forgetting)
            if updater
            else None,
            criterion=strategy.wrap_module(loss, updater.optimizer) if updater else None,
            losses=losses,
            weights=weights.plain() if weights else None,
            batch_transforms=self.build_batch_transforms(losses or [loss], facts) if train else (),
            holds=self.build_holds(model, loss, strategy, facts) if train else None,
            averages=self.build_averages(model, copies, strategy, facts),
            other_updaters=others,
        )

    def task(self, parts: Parts) -> Task:
        """Return the task that TASK names."""
        section = self.config.TASK
        make_model = partial(self.make_model, facts=self._known)
        return TASKS.build(
            section.name, rest(section, {"name"}), facts={"parts": parts, "make_model": make_model}
        )

    def facts(self, data: Mapping[str, SplitData], plan: Plan) -> dict[str, Any]:
        """Return what parts may ask for by name, known only now that the data and the plan are."""
        train = data[TRAIN]
        tests = [split for name, split in data.items() if name != TRAIN]
        batch_size = train.section.batch_size
        per_epoch = _updates_per_epoch(plan)
        return {
            **train.facts,
            "train_samples": train.length,
            "test_samples": sum(split.length for split in tests),
            "batch_size": batch_size,
            "epochs": plan.epochs,
            "updates": plan.updates,
            "updates_per_epoch": per_epoch[0] if len(set(per_epoch)) == 1 else nan,
            "train_batches": plan.updates,
            "test_batches": sum(phase.steps for phase in plan.phases if not phase.is_train),
            "world": self.world.size,
            "device": self.machine.device,
            "precision": self.machine.precision,
        }

    def stage_facts(self, plan: Plan) -> list[dict[str, Any]]:
        """Return what schedules of a stage's own may ask for by name, for each stage."""
        return [
            {
                "batch_size": config.DATA.TRAIN.batch_size,
                "updates": updates,
                "updates_per_epoch": per_epoch,
            }
            for config, (_, updates), per_epoch in zip(
                self.stage_configs, plan.stages, _updates_per_epoch(plan), strict=False
            )
        ]

    def stage_losses(self, loss: nn.Module, facts: Mapping[str, Any]) -> list[nn.Module]:
        """Return the loss in each stage; none where it is one for the whole run.

        Raises:
            ConfigError: a stage has another loss, and that one learns or keeps a state, which would
                be lost.
        """
        if all(config.LOSS == self.config.LOSS for config in self.stage_configs):
            return []
        found = []
        for number, config in enumerate(self.stage_configs):
            same = config.LOSS == self.config.LOSS
            found.append(
                loss if same else self.build_loss(facts, config.LOSS).to(self.machine.device)
            )
            if found[-1].state_dict() or (not same and loss.state_dict()):
                raise ConfigError(
                    f"PHASES.stages[{number}].LOSS: the loss {config.LOSS.name!r} has weights or "
                    "buffers of its own, "
                    "which would be lost from one stage to the next; only a loss without any may "
                    "change in a run"
                )
        return found

    def prepare(
        self, model: nn.Module, loss: nn.Module, *, train: bool
    ) -> tuple[nn.Module, nn.Module, list[str]]:
        """Return model and loss as the strategy takes them, and which modules compute their
        activations twice.

        The order is fixed: device, SyncBatchNorm, freezing, activation checkpointing; then come
        copies for averages, the strategy, the optimizer, the strategy's wrapper and compilation.
        Parameters that do not require a gradient stay so.
        """
        model.to(self.machine.device)
        loss.to(self.machine.device)
        over = self.config.DISTRIBUTED.sync_batch_norm
        if over and not self.world.is_single_process:
            group = subgroup(self.world, partition(self.world, over, "DISTRIBUTED.sync_batch_norm"))
            model, loss = synchronized(model, group), synchronized(loss, group)
        if train:
            self.freeze(model, loss)
        rules = self.config.MACHINE.activation_checkpointing
        return model, loss, checkpoint_activations(model, rules) if train and rules else []

    def compiled(self, network: nn.Module, model: nn.Module, forgetting: list[str]) -> nn.Module:
        """Return what is called in training: the network as the strategy wraps it, compiled where
        that is asked for."""
        section = self.config.MACHINE.compile
        if section is None:
            return network
        settings = CompileSettings(**section)
        check_compilable(model, forgetting, settings)
        return Compiled(network, settings)

    def build_model(self, facts: Mapping[str, Any]) -> nn.Module:
        """Return the model, its weights drawn from the run's seed."""
        reseed_all(seed_of(self.seed, "init", "model"))
        return self.make_model(rest(self.config.MODEL, MODEL_KEYS - {"name"}), "MODEL", facts=facts)

    def make_model(
        self,
        section: Mapping[str, Any],
        where: str,
        own: Mapping[str, Any] = MappingProxyType({}),
        *,
        facts: Mapping[str, Any],
    ) -> nn.Module:
        """Return a model that a section of the config describes, its weights drawn from the global
        generators.

        Args:
            section: its name and parameters.
            where: config path, for messages.
            own: what it may ask for by name, in place of the facts of the run.
            facts: of the run.

        Raises:
            ConfigError: there is no such model, it cannot be made, or its state is more than
                tensors.
        """
        if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
            raise ConfigError(
                f"{where} = {section!r}: expected a mapping with `name`, that of a model, and "
                "parameters"
            )
        given = {**facts, **own, "make_model": partial(self.make_model, facts=facts)}
        name = section["name"]
        used = dict[str, Any]()
        model = MODELS.build(name, rest(section, {"name"}), where=where, facts=given, used=used)
        self.used |= {key: value for key, value in used.items() if not key.endswith(".make_model")}
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{where}.name = {name!r} gave {type(model).__name__}, expected a torch.nn.Module"
            )
        other = next(
            (
                (key, type(one))
                for key, one in model.state_dict().items()
                if not isinstance(one, Tensor)
            ),
            None,
        )
        if other is not None:
            raise ConfigError(
                f"{where}.name = {name!r}: {other[0]} of its state is of type {other[1].__name__}, "
                "and only tensors "
                "are saved, averaged and compared; register a buffer in its place, or return a "
                "tensor from "
                "get_extra_state"
            )
        return model

    def load_weights(self, model: nn.Module) -> Report | None:
        """Give a fresh model the weights that MODEL.weights names; every process takes part."""
        sources = sources_of(self.config.MODEL.weights)
        if sources:
            return start_from(model, sources, self.world)
        return None

    def build_loss(self, facts: Mapping[str, Any], section: AttrDict | None = None) -> nn.Module:
        """Return the loss as a module; a plain function is wrapped in one."""
        reseed_all(seed_of(self.seed, "init", "loss"))
        return self.make_loss(section or self.config.LOSS, "LOSS", facts)

    def make_loss(
        self, section: Mapping[str, Any], where: str, facts: Mapping[str, Any]
    ) -> nn.Module:
        """Return the loss that a section of the config describes, see `make_model`."""
        params = rest(section, {"name"})
        name = section["name"]
        used = dict[str, Any]()
        factory = LOSSES.find(name, f"{where}.name")
        tensors = [key for key, hint in parameter_types(factory).items() if _takes_tensor(hint)]
        params |= {
            key: torch.tensor(params[key], dtype=torch.float32)
            for key in tensors
            if params.get(key) is not None
        }
        if not isinstance(factory, type) and list(parameters(factory))[1:2] == [
            "target"
        ]:  # loss(output, target, ...)
            return FunctionLoss(factory, params)
        given = {**facts, "make_loss": partial(self.make_loss, facts=facts), "world": self.world}
        loss = LOSSES.build(name, params, where=where, facts=given, used=used)
        self.used |= {
            key: value for key, value in used.items() if not key.endswith((".make_loss", ".world"))
        }
        if isinstance(loss, _Loss) and loss.reduction not in ("mean", "batchmean"):
            raise ConfigError(
                f"{where}.reduction = {loss.reduction!r}: an update weighs means over samples; "
                "leave it out, which is "
                "mean, and scale with OPTIMIZER.lr"
            )
        if isinstance(loss, nn.Module):
            return loss
        return FunctionLoss(loss, {})

    def build_meters(self, facts: Mapping[str, Any]) -> dict[str, Meter]:
        """Return the meters by label, in the order of their keys."""

        def build(label: str, section: AttrDict) -> Meter:
            name = section.get("name", label)
            params = rest(section, {"name", *METER_KEYS})
            return METERS.build(name, params, where=f"METERS.{label}", facts=facts, used=self.used)

        return {label: build(label, section) for label, section in self.config.METERS.items()}

    def choices(self) -> dict[str, OutputChoice]:
        """Return for the labels of meters that do not look at all outputs and targets at which they
        do."""
        return {
            label: OutputChoice(f"METERS.{label}", section.get("output"), section.get("target"))
            for label, section in self.config.METERS.items()
            if not METER_KEYS.isdisjoint(section)
        }


def _updates_per_epoch(plan: Plan) -> list[float]:
    """Return the updates of a pass over the training data in each stage; 0.0 where there is
    none."""
    found = [0.0] * len(plan.stages)
    for phase in reversed(plan.phases):
        if phase.is_train:
            found[phase.stage] = phase.end / phase.batch_size
    return found


def _takes_tensor(hint: Any) -> bool:
    return torch.Tensor in (hint, *get_args(hint))


def _has_separate_updaters(name: str) -> bool:
    kind = TASKS.find(name, "TASK.name")
    return isinstance(kind, type) and issubclass(kind, Task) and kind.separate_updaters
