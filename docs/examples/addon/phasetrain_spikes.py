"""What the add-on adds. Nothing else is imported before it is used."""

from phasetrain.config.addons import AddOn, Command, Engine

PARTS = "phasetrain_spikes_parts"


def register(addon: AddOn) -> None:
    """Declare a command, an engine, a hook and a loss."""
    addon.add_commands(
        Command(
            "spikes",
            "RUN_FOLDER",
            "list the epochs whose loss exceeds FACTOR times that of the previous epoch",
            f"{PARTS}:run_spikes",
            arguments=f"{PARTS}:add_spikes_arguments",
        )
    )
    addon.add_engines(Engine("count_updates", f"{PARTS}:count_updates", is_distributed=False))
    addon.add_parts("hook", {"spike_alarm": PARTS})
    addon.add_parts("loss", {"clipped_cross_entropy": PARTS})
