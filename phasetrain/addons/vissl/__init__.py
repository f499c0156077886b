"""Conversion of the configs of VISSL, and a meter of its tests."""

from phasetrain.config.addons import AddOn, Command

COMMAND = "phasetrain.addons.vissl.command"


def register(addon: AddOn) -> None:
    """Declare what this add-on adds."""
    addon.add_parts("meter", {"present_accuracy": "phasetrain.addons.vissl.present_accuracy"})
    addon.add_commands(
        Command(
            "migrate vissl",
            "CONFIG.yaml... [--out FILE.yaml]",
            "convert a VISSL config to an experiment, with a report on each key",
            f"{COMMAND}:run_migrate_vissl",
            arguments=f"{COMMAND}:add_migrate_arguments",
        ),
    )
