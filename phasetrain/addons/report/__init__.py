"""The HTML report of a run."""

from phasetrain.config.addons import AddOn, Command

COMMAND = "phasetrain.addons.report.command"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "report",
            "RUN_FOLDER...",
            "write the HTML report of a run, or of several runs compared",
            f"{COMMAND}:run_report",
            arguments=f"{COMMAND}:add_report_arguments",
        ),
    )
    addon.add_parts("hook", {"report": "phasetrain.addons.report.hook"})
    addon.add_keys("HOOKS", "phasetrain.addons.report.keys:HookKeys")
    addon.add_service("write_report", "phasetrain.addons.report.page:write_report")
    addon.add_service("normalize_pixels", "phasetrain.addons.report.images:normalize_pixels")
