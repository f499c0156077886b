"""Loading newer weights while a run trains (hook `reload_weights`)."""

from phasetrain.config.addons import AddOn


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_parts("hook", {"reload_weights": "phasetrain.addons.reload.reload_weights"})
