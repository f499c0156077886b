"""Writing configs: help on topics, new projects, schemas for editors, completion of commands."""

from phasetrain.config.addons import AddOn, Command

COMMANDS = "phasetrain.addons.authoring.commands"
LIGHTNING = "phasetrain.addons.authoring.lightning.command"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "new",
            "PATH",
            "start a project: an experiment, parts with a test, and the schema for editors",
            f"{COMMANDS}:run_new",
            arguments=f"{COMMANDS}:add_new_arguments",
        ),
        Command(
            "migrate lightning",
            "CONFIG.yaml [--choose GROUP=NAME] [--out FILE.yaml]",
            "convert a config of the lightning-hydra-template, with a report on each key",
            f"{LIGHTNING}:run_migrate_lightning",
            arguments=f"{LIGHTNING}:add_migrate_arguments",
        ),
        Command(
            "schema",
            "[--out FILE] [OVERRIDE ...]",
            "write a JSON Schema of experiments, with which editors complete and check keys",
            f"{COMMANDS}:run_schema",
            takes_overrides=True,
            arguments=f"{COMMANDS}:add_schema_arguments",
        ),
        Command(
            "completion",
            "SHELL [OVERRIDE ...]",
            "print a script with which bash or zsh complete keys, parts, values and run folders",
            f"{COMMANDS}:run_completion",
            takes_overrides=True,
            arguments=f"{COMMANDS}:add_completion_arguments",
            choices=("bash", "zsh"),
        ),
    )
    addon.add_service("read_signature", "phasetrain.addons.authoring.part_source:read_signature")
    addon.add_service("explain_topic", f"{COMMANDS}:explain_topic")
