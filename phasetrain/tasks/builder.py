"""From sections to parts: the one place that reads DATA, MODEL, LOSS, METERS, OPTIMIZER and TASK."""

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES, FunctionLoss
from phasetrain.machine import reseed_all, seed_of
from phasetrain.meters import METERS, Meter
from phasetrain.models import MODELS
from phasetrain.models.prepare import Compiled, CompileSettings, check_compilable, checkpoint_activations, synchronized
from phasetrain.models.sources import sources_of
from phasetrain.models.weights import Report, start_from
from phasetrain.plan import TRAIN, Plan
from phasetrain.registry import parameter_types, parameters
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.data_builder import DataBuilder, SplitData
from phasetrain.tasks.optimizer_builder import OptimizerBuilder
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.sections import MODEL_KEYS, rest


class Builder(DataBuilder, OptimizerBuilder):
    """Makes the parts of a run; override a `build_*` to make one of them another way.

    Args:
        config: the checked config.
        machine: where the run computes.
        world: its processes.
    """

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
        return TASKS.build(section.name, rest(section, {"name"}), facts={"parts": parts})

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

    def build_model(self, facts: Mapping[str, Any]) -> nn.Module:
        """Return the model, its weights drawn from the run's seed."""
        reseed_all(seed_of(self.seed, "init", "model"))
        section = self.config.MODEL
        model = MODELS.build(section.name, rest(section, MODEL_KEYS), facts=facts, used=self.used)
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
        params = rest(section, {"name"})
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
            name, params = section.get("name", label), rest(section, {"name"})
            return METERS.build(name, params, where=f"METERS.{label}", facts=facts, used=self.used)

        return {label: build(label, section) for label, section in self.config.METERS.items()}


def _takes_tensor(hint: Any) -> bool:
    return torch.Tensor in (hint, *get_args(hint))
