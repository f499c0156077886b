"""The parts of the core: the registry of each kind, and which module registers a name, so that it
is imported when it is used."""

from collections.abc import Mapping
from types import MappingProxyType

DECLARED_PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "adapter": {},
        "batch transform": {},
        "collate function": {
            "list": "phasetrain.data.loading.collate",
            "pad": "phasetrain.data.loading.collate",
            "stack": "phasetrain.data.loading.collate",
        },
        "dataset": {
            "digits": "phasetrain.data.datasets.digits",
            "idx": "phasetrain.data.datasets.idx",
            "synthetic": "phasetrain.data.datasets.synthetic",
        },
        "format of weights": {
            "phasetrain": "phasetrain.checkpoint.weights",
            "safetensors": "phasetrain.models.sources.layouts",
            "torch": "phasetrain.models.sources.layouts",
            "vissl": "phasetrain.models.sources.layouts",
        },
        "head": {},
        "hook": {
            "console": "phasetrain.hooks.progress.console",
            "early_stopping": "phasetrain.hooks.monitors.early_stopping",
            "ledger": "phasetrain.hooks.ledger",
            "metrics": "phasetrain.hooks.metrics",
            "numerics": "phasetrain.hooks.numerics",
        },
        "loader": {},
        "loss": {
            "cross_entropy": "phasetrain.losses.cross_entropy",
            "from_model": "phasetrain.losses.from_model",
            "weighted_sum": "phasetrain.losses.weighted_sum",
        },
        "meter": {
            "accuracy": "phasetrain.meters.accuracy",
            "logged": "phasetrain.meters.loss",
            "loss": "phasetrain.meters.loss",
        },
        "model": {
            "mlp": "phasetrain.models.mlp",
            "small_cnn": "phasetrain.models.small_cnn",
        },
        "optimizer": {
            "adam": "phasetrain.optim.optimizers",
            "adamw": "phasetrain.optim.optimizers",
            "sgd": "phasetrain.optim.optimizers",
        },
        "sampler": {
            "sequential": "phasetrain.data.samplers.phase_sampler",
            "shuffled": "phasetrain.data.samplers.phase_sampler",
        },
        "scaler": {
            "auto": "phasetrain.optim.update.scalers",
            "grad": "phasetrain.optim.update.scalers",
            "none": "phasetrain.optim.update.scalers",
        },
        "schedule": {
            "composite": "phasetrain.optim.schedules.schedules",
            "constant": "phasetrain.optim.schedules.schedules",
            "cosine": "phasetrain.optim.schedules.schedules",
            "linear": "phasetrain.optim.schedules.schedules",
            "multistep": "phasetrain.optim.schedules.schedules",
            "one_cycle": "phasetrain.optim.schedules.schedules",
        },
        "strategy": {
            "ddp": "phasetrain.distributed.strategies.ddp",
            "none": "phasetrain.distributed.strategies.base",
        },
        "task": {
            "supervised": "phasetrain.tasks.supervised",
        },
        "transform": {
            "apply": "phasetrain.data.transforms.apply",
            "center_crop": "phasetrain.data.transforms.center_crop",
            "flatten": "phasetrain.data.transforms.flatten",
            "noise": "phasetrain.data.transforms.noise",
            "normalize": "phasetrain.data.transforms.normalize",
            "on_fields": "phasetrain.data.transforms.on_fields",
            "random_crop": "phasetrain.data.transforms.random_crop",
            "random_flip": "phasetrain.data.transforms.random_flip",
            "random_shift": "phasetrain.data.transforms.random_shift",
            "resize": "phasetrain.data.transforms.resize",
        },
    }
)
"""Kind of parts -> name of a part -> module whose import registers it; add-ons declare theirs with
`phasetrain.config.addons.AddOn.add_parts`."""

REGISTRIES: Mapping[str, str] = MappingProxyType(
    {
        "adapter": "phasetrain.models.adapters.base:ADAPTERS",
        "batch transform": "phasetrain.data.batch_transforms.base:BATCH_TRANSFORMS",
        "collate function": "phasetrain.data.loading.collate:COLLATES",
        "dataset": "phasetrain.data.datasets.base:DATASETS",
        "format of weights": "phasetrain.models.sources.base:FORMATS",
        "head": "phasetrain.models.base:HEADS",
        "hook": "phasetrain.hooks.base:HOOKS",
        "loader": "phasetrain.data.loading.custom_loader:LOADERS",
        "loss": "phasetrain.losses.base:LOSSES",
        "meter": "phasetrain.meters.base:METERS",
        "model": "phasetrain.models.base:MODELS",
        "optimizer": "phasetrain.optim.optimizers:OPTIMIZERS",
        "sampler": "phasetrain.data.samplers.phase_sampler:SAMPLERS",
        "scaler": "phasetrain.optim.update.scalers:SCALERS",
        "schedule": "phasetrain.optim.schedules.schedules:SCHEDULES",
        "strategy": "phasetrain.distributed.strategies.base:STRATEGIES",
        "task": "phasetrain.tasks.base:TASKS",
        "transform": "phasetrain.data.transforms.base:TRANSFORMS",
    }
)
"""Kind of parts -> `module:name` of its registry."""

RUN_FACTS = frozenset(
    {
        *("train_samples", "test_samples", "train_batches", "test_batches", "batch_size"),
        *("epochs", "updates", "updates_per_epoch", "world", "device", "precision", "shards"),
        *("dimensions", "make_model", "make_loss"),
    }
)
"""Names of the values about the run that parts may ask for; hardly any config sets them."""

FACTS = RUN_FACTS | {
    *("classes", "class_names", "channels", "input_shape", "vocabulary", "context"),
    *("tokenizer_digest", "token_bytes", "end_token"),
}
"""Names of the values that parts may ask for; a dataset may add more by its `facts()`."""
