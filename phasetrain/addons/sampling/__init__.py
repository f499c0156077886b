"""Further samplers, and datasets made of others or by the task: mixtures, windows."""

from phasetrain.config.addons import AddOn, PartPlace

PACKAGE = "phasetrain.addons.sampling"

SOURCE_KEYS = ("batch_size", "transforms", "collate", "inputs", "targets", "label_type")
"""Keys of a dataset in a mixture with a batch size per source; the rest are parameters."""


def register(addon: AddOn) -> None:
    """Declare the parts of this add-on."""
    addon.add_parts(
        "dataset",
        {
            "from_task": f"{PACKAGE}.from_task",
            "mixed": f"{PACKAGE}.mixture",
            "windows": f"{PACKAGE}.windows",
        },
    )
    samplers = ("infinite", "power_law", "repeated", "weighted")
    addon.add_parts(
        "sampler",
        {
            **dict.fromkeys(samplers, f"{PACKAGE}.samplers"),
            "proportional": f"{PACKAGE}.proportional",
        },
    )
    addon.add_slots(
        PartPlace(
            "DATA.*.datasets.*",
            "dataset",
            other_keys=("subset", *SOURCE_KEYS),
            only=("DATA.*", "mixed"),
        )
    )
