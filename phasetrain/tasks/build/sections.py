"""What the makers of parts have in common: the config, and how a section names a part."""

from collections.abc import Mapping, Sequence
from typing import Any

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import Registry
from phasetrain.config.sections import (
    DistributedSection,
    MeterSection,
    ModelSection,
    OptimizerSection,
    TrainSplitSection,
    own_keys,
)
from phasetrain.distributed import World
from phasetrain.runtime.machine import Machine

DATA_KEYS = own_keys(TrainSplitSection)
"""Keys of a split that are not parameters of the dataset."""

DISTRIBUTED_KEYS = own_keys(DistributedSection)
"""Keys of DISTRIBUTED that are not parameters of the strategy."""

METER_KEYS = own_keys(MeterSection)
"""Keys of an entry of METERS that are not parameters of the meter."""

MODEL_KEYS = own_keys(ModelSection)
"""Keys of MODEL that are not parameters of the model."""

OPTIMIZER_KEYS = own_keys(OptimizerSection)
"""Keys of OPTIMIZER that are not parameters of the optimizer."""


class Sections:
    """Makes parts from sections of the config.

    Args:
        config: the checked config.
        machine: where the run computes.
        world: its processes.
        stages: the config as it is in each stage of PHASES.stages.

    Attributes:
        used: facts that were passed to parts, by the config key that each stands for.
    """

    def __init__(
        self, config: AttrDict, machine: Machine, world: World, stages: Sequence[AttrDict] = ()
    ) -> None:
        self.config = config
        self.stage_configs = tuple(stages)
        self.machine = machine
        self.world = world
        self.seed: int = config.RUN.seed
        self.used: dict[str, Any] = {}

    def named(
        self, registry: Registry[Any], item: Any, where: str, facts: Mapping[str, Any] | None = None
    ) -> Any:
        """Build what is written as a bare name or as a mapping with `name` and parameters."""
        if isinstance(item, str):
            return registry.build(item, {}, where=where, facts=facts)
        return registry.build(item["name"], rest(item, {"name"}), where=where, facts=facts)


def rest(section: Mapping[str, Any], own: frozenset[str] | set[str]) -> dict[str, Any]:
    """Return what a section says beside its own keys: the parameters of the part that it names."""
    return {key: value for key, value in section.items() if key not in own}
