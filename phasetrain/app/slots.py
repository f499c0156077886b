"""The places in the config where a name chooses a part, without the parts themselves: this module
does not import torch."""

from phasetrain.config.sections.data import SOURCE_KEYS
from phasetrain.config.validation import Slot

SAMPLER_FACTS = frozenset({"batch_size", "shard_lengths", "source", "data_source", "dataset"})
"""Parameters of samplers that the program passes."""

LOSS_FACTS = frozenset({"input", "output", "target", "world", "make_loss"})
"""Parameters of losses that a config cannot set."""

LOADER_FACTS = frozenset({"dataset", "batch_size", "rank", "processes", "seed"})
"""Parameters of custom loaders that the program passes."""

SLOTS = (
    Slot("TASK", "task", provided=frozenset({"parts", "make_model"})),
    Slot("TASK.teacher", "model", only=("TASK", "distillation")),
    Slot("TASK.judge", "model", only=("TASK", "gan")),
    Slot("TASK.teacher", "model", only=("TASK", "self_supervised")),
    Slot("MODEL", "model", provided=frozenset({"make_model"})),
    Slot("MODEL.trunk", "model", only=("MODEL", "trunk_heads")),
    Slot("MODEL.heads.*", "model", only=("MODEL", "trunk_heads")),
    Slot("MODEL.trunk", "model", only=("MODEL", "trunk_head")),
    Slot("MODEL.head", "head", provided=frozenset({"features"}), only=("MODEL", "trunk_head")),
    Slot(
        "MODEL.predictor",
        "head",
        provided=frozenset({"features"}),
        only=("MODEL", "trunk_head"),
    ),
    Slot(
        "MODEL.adapters",
        "adapter",
        provided=frozenset({"layer", "layer_name", "generator"}),
    ),
    Slot("LOSS", "loss", provided=LOSS_FACTS),
    Slot("LOSS.losses.*", "loss", provided=LOSS_FACTS, only=("LOSS", "weighted_sum")),
    Slot("METERS.*", "meter"),
    Slot("OPTIMIZER", "optimizer", provided=frozenset({"params", "lr"})),
    Slot("OPTIMIZER.SCHEDULES.*", "schedule", provided=frozenset({"base_value"})),
    Slot(
        "OPTIMIZER.SCHEDULES.*.parts[]",
        "schedule",
        provided=frozenset({"base_value"}),
        only=("OPTIMIZER.SCHEDULES.*", "composite"),
    ),
    Slot("OPTIMIZER.others.*", "optimizer", provided=frozenset({"params"})),
    Slot("OPTIMIZER.others.*.SCHEDULES.*", "schedule", provided=frozenset({"base_value"})),
    Slot(
        "OPTIMIZER.others.*.SCHEDULES.*.parts[]",
        "schedule",
        provided=frozenset({"base_value"}),
        only=("OPTIMIZER.others.*.SCHEDULES.*", "composite"),
    ),
    Slot("OPTIMIZER.scaler", "scaler"),
    Slot("DATA.*", "dataset"),
    Slot(
        "DATA.*.datasets.*",
        "dataset",
        other_keys=("subset", *SOURCE_KEYS),
        only=("DATA.*", "mixed"),
    ),
    Slot("DATA.*.transforms[]", "transform"),
    *(
        Slot("DATA.*.transforms[].transforms[]", "transform", only=("DATA.*.transforms[]", name))
        for name in ("apply", "on_fields")
    ),
    Slot(
        "DATA.*.transforms[].groups[].transforms[]",
        "transform",
        only=("DATA.*.transforms[]", "multi_crop"),
    ),
    Slot(
        "DATA.*.transforms[].groups[].transforms[].transforms[]",
        "transform",
        only=("DATA.*.transforms[].groups[].transforms[]", "apply"),
    ),
    Slot("DATA.TRAIN.batch_transforms[]", "batch transform"),
    *(
        Slot(
            "DATA.TRAIN.batch_transforms[].transforms[]",
            "batch transform",
            only=("DATA.TRAIN.batch_transforms[]", name),
        )
        for name in ("one_of", "each_view")
    ),
    Slot("DATA.*.sampler", "sampler", provided=SAMPLER_FACTS),
    Slot("DATA.*.collate", "collate function"),
    Slot("DATA.*.loader", "loader", provided=LOADER_FACTS),
    Slot("DISTRIBUTED", "strategy", provided=frozenset({"world", "communication", "precision"})),
    Slot("HOOKS.*", "hook", provided=frozenset({"terminal", "hparams"})),
)
"""The places in the config where a name chooses a part."""
