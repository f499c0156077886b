"""Conversion of the configs of VISSL."""

from phasetrain.config.addons import AddOn, Command

COMMAND = "phasetrain.addons.vissl.command"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "migrate vissl",
            "CONFIG.yaml... [--out FILE.yaml]",
            "convert a VISSL config to an experiment, with a report on each key",
            f"{COMMAND}:run_migrate_vissl",
            arguments=f"{COMMAND}:add_migrate_arguments",
        ),
    )
