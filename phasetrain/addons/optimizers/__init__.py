"""LARS, LAMB and Muon, further schedules, lower learning rates on a plateau, and the state of an
optimizer from elsewhere."""

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
    schedules = ("cosine_restarts", "exponential", "inverse_sqrt", "polynomial", "step", "wsd")
    addon.add_parts("schedule", dict.fromkeys(schedules, f"{PACKAGE}.schedules"))
    addon.add_parts("hook", {"plateau": f"{PACKAGE}.plateau"})
    addon.add_service("SamSettings", f"{PACKAGE}.sam:SamSettings")
    addon.add_service("load_optimizer_state", f"{PACKAGE}.optimizer_state:load_optimizer_state")
