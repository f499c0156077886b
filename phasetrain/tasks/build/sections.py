"""What the makers of parts have in common: the config, and how a section names a part."""

from collections.abc import Mapping, Sequence
from typing import Any

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import Registry
from phasetrain.distributed import World
from phasetrain.runtime.machine import Machine

DATA_KEYS = frozenset(
    {
        "dataset",
        "batch_size",
        "micro_batch_size",
        "workers",
        "drop_last",
        "sampler",
        "transforms",
        "collate",
    }
    | {
        "prefetch",
        "start_method",
        "timeout_seconds",
        "pin_memory",
        "on_bad_sample",
        "bad_sample_budget",
    }
    | {"batch_transforms", "subset", "inputs", "targets", "label_type", "prefetch_to_device"}
    | {"loader", "fast_forward"}
)
"""Keys of a split that are the section's own; all others are parameters of the data set."""

TRAIN_KEYS = frozenset({"batch_transforms"})
"""Those of them that only DATA.TRAIN has."""

DISTRIBUTED_KEYS = frozenset(
    {
        "strategy",
        "reduction",
        "virtual_shards",
        "sync_batch_norm",
        "communication",
        "timeout_seconds",
        "debug",
    }
)
"""Keys of DISTRIBUTED that are the section's own; all others are parameters of the strategy."""

METER_KEYS = frozenset({"output", "target"})
"""Keys of a label of METERS that are the section's own: which of several outputs and targets the
meter looks at."""

MODEL_KEYS = frozenset({"name", "weights", "freeze", "freeze_updates", "ema", "swa"})
"""Keys of MODEL that are the section's own; all others are parameters of the model."""

OPTIMIZER_KEYS = frozenset(
    {
        "name",
        "lr",
        "auto_lr_scaling",
        "groups",
        "layer_decay",
        "others",
        "sam",
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
