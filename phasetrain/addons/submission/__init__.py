"""Submitting runs to clusters (section LAUNCH)."""

from phasetrain.config.addons import AddOn


def register(addon: AddOn) -> None:
    """Declare what this add-on adds."""
    addon.add_service("submit", "phasetrain.addons.submission.submit:submit")
