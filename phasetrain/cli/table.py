"""The table of commands, from which parsing, `--help` and the reference table are made."""

from functools import cache

from phasetrain.config.addons import Command, load_addons, make_conflict_error
from phasetrain.errors import ConfigError

TRAIN = "phasetrain.cli.train_commands"
RUNS = "phasetrain.cli.run_commands"
HELP = "phasetrain.cli.help_command"

CORE_COMMANDS = (
    Command(
        "train",
        "[OVERRIDE ...]",
        "start or resume training; the default command",
        f"{TRAIN}:run_train",
        takes_overrides=True,
        arguments=f"{TRAIN}:add_train_arguments",
    ),
    Command(
        "resume",
        "RUN_FOLDER [OVERRIDE ...]",
        "resume the run of a folder with its own config, or with changes of it",
        f"{TRAIN}:run_resume",
        takes_overrides=True,
        arguments=f"{TRAIN}:add_resume_arguments",
    ),
    Command(
        "plan",
        "[RUN_FOLDER] [OVERRIDE ...]",
        "show the phases, learning rates, checkpoints and memory of a run before it starts",
        f"{TRAIN}:run_engine",
        takes_overrides=True,
        arguments=f"{TRAIN}:add_folder_flags",
        engine="plan",
    ),
    Command(
        "test",
        "[RUN_FOLDER] [OVERRIDE ...]",
        "test a checkpoint of a run on every test split",
        f"{TRAIN}:run_engine",
        takes_overrides=True,
        arguments=f"{TRAIN}:add_checkpoint_flags",
        engine="test",
    ),
    Command(
        "runs list",
        "[FOLDER]",
        "list runs: state, progress, best metric, time left, last error",
        f"{RUNS}:run_list",
        arguments=f"{RUNS}:add_list_arguments",
    ),
    Command(
        "help",
        "[TOPIC]",
        "show this help, or help on a section, a key, a part or a command",
        f"{HELP}:run_help",
        arguments=f"{HELP}:add_help_arguments",
    ),
)
"""Commands of the core; the first is the default."""


@cache
def list_commands() -> tuple[Command, ...]:
    """Return the commands of the core and of the installed add-ons; the first is the default.

    Raises:
        ConfigError: an add-on adds a command of the core.
    """
    own = {command.name for command in CORE_COMMANDS}
    added = []
    for addon in load_addons():
        for command in addon.commands:
            if command.name in own:
                raise make_conflict_error(addon, f"the command {command.name!r}")
            added.append(command)
    # `help` stays the last one.
    return (*CORE_COMMANDS[:-1], *added, CORE_COMMANDS[-1])


def find_command(name: str) -> Command:
    """Return the command of a name.

    Raises:
        ConfigError: it belongs to an add-on that is not installed.
    """
    for command in list_commands():
        if command.name == name:
            return command
    raise ConfigError(
        f"the command {name!r} is not installed here; install phasetrain with all of its add-ons",
        code="addon.missing",
    )


def list_group(name: str) -> list[Command]:
    """Return the commands of two words that begin with a word which is no command itself."""
    commands = list_commands()
    if any(command.name == name for command in commands):
        return []
    return [command for command in commands if command.name.startswith(f"{name} ")]


def format_commands() -> str:
    """Return the commands as lines of `--help`."""
    rows = [f"  {command.name:<16} {command.help}" for command in list_commands()]
    return "\n".join(["commands", *rows])
