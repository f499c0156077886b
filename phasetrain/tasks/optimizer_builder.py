"""From sections OPTIMIZER and DISTRIBUTED to what makes an update."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.distributed import STRATEGIES, Ordered, Strategy, World, buffers_of
from phasetrain.errors import ConfigError
from phasetrain.machine import Machine
from phasetrain.optim import OPTIMIZERS, SCALERS, SCHEDULES, GuardSettings, Updater, fusable
from phasetrain.optim.groups import check_options, grouped, table, weights_of
from phasetrain.registry import parameters
from phasetrain.tasks.sections import DISTRIBUTED_KEYS, OPTIMIZER_KEYS, Sections, rest


class OptimizerBuilder(Sections):
    """Makes the strategy and the updater.

    Attributes:
        groups: a row for each of several groups of weights, see `phasetrain.optim.groups.table`.
    """

    def __init__(self, config: AttrDict, machine: Machine, world: World) -> None:
        super().__init__(config, machine, world)
        self.groups: list[tuple[str, str, str, str]] = []

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
        params = rest(section, DISTRIBUTED_KEYS)
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
        params = rest(section, OPTIMIZER_KEYS)
        shards = {"shards": strategy.shards}
        scaler = self.named(SCALERS, section.scaler, "OPTIMIZER.scaler", {**facts, **shards})
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
            option: self.named(SCHEDULES, item, f"OPTIMIZER.SCHEDULES.{option}", facts)
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
