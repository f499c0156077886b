"""Optimizers that neither torch nor another library has in this form: LARS, LAMB, Muon."""

from phasetrain.config.addons import AddOn

PACKAGE = "phasetrain.addons.optimizers"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_parts(
        "optimizer",
        {
            **dict.fromkeys(("lamb", "lars"), f"{PACKAGE}.large_batch"),
            "muon": f"{PACKAGE}.muon",
        },
    )
