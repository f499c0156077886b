"""LARS, LAMB and Muon, further schedules, and the state of an optimizer from elsewhere."""

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
    schedules = ("cosine_restarts", "inverse_sqrt", "polynomial", "wsd")
    addon.add_parts("schedule", dict.fromkeys(schedules, f"{PACKAGE}.schedules"))
    addon.add_service("load_optimizer_state", f"{PACKAGE}.optimizer_state:load_optimizer_state")
