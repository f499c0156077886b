"""The places in the config where a name chooses a part, without the parts themselves: this module
does not import torch."""

from phasetrain.config.addons import describe_place, load_addons, make_conflict_error
from phasetrain.config.sections.optimizer import SCHEDULED
from phasetrain.config.validation import PartLocation

SAMPLER_FACTS = frozenset({"batch_size", "shard_lengths", "source", "data_source", "dataset"})
"""Parameters of samplers that the program passes."""

LOSS_FACTS = frozenset({"input", "output", "target", "world", "make_loss"})
"""Parameters of losses that a config cannot set."""

LOADER_FACTS = frozenset({"dataset", "batch_size", "rank", "processes", "seed"})
"""Parameters of custom loaders that the program passes."""

_BASE_VALUE = frozenset({"base_value"})


def _list_schedule_slots(place: str) -> tuple[PartLocation, PartLocation]:
    """Return the slots of the schedules of a place, and of the parts of composite ones."""
    path = f"{place}.SCHEDULES.*"
    return (
        PartLocation(path, "schedule", provided=_BASE_VALUE),
        PartLocation(f"{path}.parts[]", "schedule", provided=_BASE_VALUE, only=(path, "composite")),
    )


CORE_SLOTS = (
    PartLocation("TASK", "task", provided=frozenset({"parts", "make_model"})),
    PartLocation("MODEL", "model", provided=frozenset({"make_model"})),
    PartLocation(
        "MODEL.adapters",
        "adapter",
        provided=frozenset({"layer", "layer_name", "generator"}),
    ),
    PartLocation("LOSS", "loss", provided=LOSS_FACTS),
    PartLocation("LOSS.losses.*", "loss", provided=LOSS_FACTS, only=("LOSS", "weighted_sum")),
    PartLocation("METERS.*", "meter"),
    PartLocation("OPTIMIZER", "optimizer", provided=frozenset({"params", "lr"})),
    PartLocation("OPTIMIZER.others.*", "optimizer", provided=frozenset({"params"})),
    *(slot for place in SCHEDULED for slot in _list_schedule_slots(place)),
    PartLocation("OPTIMIZER.scaler", "scaler"),
    PartLocation("DATA.*", "dataset"),
    PartLocation("DATA.*.transforms[]", "transform"),
    *(
        PartLocation(
            "DATA.*.transforms[].transforms[]", "transform", only=("DATA.*.transforms[]", name)
        )
        for name in ("apply", "on_fields")
    ),
    PartLocation("DATA.TRAIN.batch_transforms[]", "batch transform"),
    PartLocation("DATA.*.sampler", "sampler", provided=SAMPLER_FACTS),
    PartLocation("DATA.*.collate", "collate function"),
    PartLocation("DATA.*.loader", "loader", provided=LOADER_FACTS),
    PartLocation(
        "DISTRIBUTED", "strategy", provided=frozenset({"world", "communication", "precision"})
    ),
    PartLocation("HOOKS.*", "hook", provided=frozenset({"terminal", "hparams"})),
)
"""The places that the core has."""


def list_slots() -> tuple[PartLocation, ...]:
    """Return the places in the config where a name chooses a part, of the core and of add-ons.

    Raises:
        ConfigError: an add-on adds a place of the core.
    """
    slots = list(CORE_SLOTS)
    places = {describe_place(slot) for slot in CORE_SLOTS}
    for addon in load_addons():
        for slot in addon.slots:
            if describe_place(slot) in places:
                raise make_conflict_error(addon, f"the place of a part {describe_place(slot)!r}")
            slots.append(PartLocation(**vars(slot)))
    return tuple(slots)
