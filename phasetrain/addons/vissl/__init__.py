"""Conversion of the configs and weights of VISSL."""

from phasetrain.config.addons import AddOn, Command

COMMAND = "phasetrain.addons.vissl.command"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "migrate vissl",
            "CONFIG... [config.KEY=VALUE...] [--out FILE.yaml]",
            "convert a VISSL config to an experiment, with a report on each key",
            f"{COMMAND}:run_migrate_vissl",
            arguments=f"{COMMAND}:add_migrate_arguments",
        ),
        Command(
            "migrate vissl-weights",
            "FILE.torch --out FILE.pt",
            "convert weights of VISSL with NumPy arrays to tensors",
            f"{COMMAND}:run_migrate_weights",
            arguments=f"{COMMAND}:add_weights_arguments",
        ),
    )
