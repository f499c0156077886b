"""The context of build functions, and how a section names a part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import Registry
from phasetrain.config.sections import (
    DistributedSection,
    MeterSection,
    ModelSection,
    OptimizerSection,
    TestSplitSection,
    TrainSplitSection,
    own_keys,
)
from phasetrain.distributed import World
from phasetrain.runtime.machine import Machine

DATA_KEYS = own_keys(TrainSplitSection) | own_keys(TestSplitSection)
"""Keys of a split that are not parameters of the dataset."""

DISTRIBUTED_KEYS = own_keys(DistributedSection)
"""Keys of DISTRIBUTED that are not parameters of the strategy."""

METER_KEYS = own_keys(MeterSection)
"""Keys of an entry of METERS that are not parameters of the meter."""

MODEL_KEYS = own_keys(ModelSection)
"""Keys of MODEL that are not parameters of the model."""

OPTIMIZER_KEYS = own_keys(OptimizerSection)
"""Keys of OPTIMIZER that are not parameters of the optimizer."""


OBJECTS = frozenset({"make_model", "make_loss", "world", "params", "lr"})
"""Names of values that parts may ask for and that say nothing about the run or its data."""


@dataclass(frozen=True)
class BuildContext:
    """Everything that a build function needs besides its arguments.

    Attributes:
        config: the validated config.
        machine: device and precision.
        world: ranks of the run.
        stages: the config in each stage of PHASES.stages; empty without stages.
        used: values that were passed to parts, by the config key that each fills in.
        logged: keys whose effect has been logged; parts may be built again after a rehearsal.
    """

    config: AttrDict
    machine: Machine
    world: World
    stages: Sequence[AttrDict] = ()
    used: dict[str, Any] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        seed: int = self.config.RUN.seed
        return seed

    @property
    def stage_configs(self) -> Sequence[AttrDict]:
        """The config in each stage; the whole config is the only stage if there are no others."""
        return self.stages or (self.config,)

    def list_facts(self) -> dict[str, Any]:
        """Return the facts that parts have asked for so far, by the config key of each."""
        return {
            key: value for key, value in self.used.items() if key.rpartition(".")[2] not in OBJECTS
        }

    def named(
        self, registry: Registry[Any], item: Any, where: str, facts: Mapping[str, Any] | None = None
    ) -> Any:
        """Build a part that is given as a name or as a mapping with `name` and parameters."""
        name, params = split_item(item)
        return registry.build(name, params, where=where, facts=facts)


def split_item(item: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and parameters of a part that is given as a name, or as a mapping with both."""
    if isinstance(item, str):
        return item, {}
    return item["name"], parameters_of(item, {"name"})


def parameters_of(section: Mapping[str, Any], own: frozenset[str] | set[str]) -> dict[str, Any]:
    """Return the parameters of the part that a section names: all but the section's keys."""
    return {key: value for key, value in section.items() if key not in own}
