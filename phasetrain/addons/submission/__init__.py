"""Submitting runs to clusters (section LAUNCH)."""

from phasetrain.config.addons import AddOn


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_service("submit", "phasetrain.addons.submission.submit:submit")
