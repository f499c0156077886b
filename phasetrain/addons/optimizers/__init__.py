"""LARS, LAMB and Muon, and the state of an optimizer from another run or a torch file."""

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
    addon.add_service("load_optimizer_state", f"{PACKAGE}.optimizer_state:load_optimizer_state")
