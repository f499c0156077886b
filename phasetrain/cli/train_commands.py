"""The commands that run an engine from a config: train, resume, plan, test and others."""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import TRUST, Call
from phasetrain.cli.table import find_command
from phasetrain.config.addons import Command, import_object
from phasetrain.errors import ConfigError

if TYPE_CHECKING:
    from phasetrain.app.stored.stored_config import StoredConfig

# The modules of the commands are imported in the functions that run them, because most of them
# import torch: `--help` and usage errors would take a second longer.


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `phasetrain` without a command."""
    parser.add_argument("-m", "--multirun", action="store_true", help="same as the command sweep")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start over; the folder of the run is kept under a number, as runs/base.1",
    )
    parser.add_argument(
        "--from", dest="run_folder", metavar="RUN_FOLDER", help="same as the command rerun"
    )
    add_folder_flags(parser)


def run_train(call: Call) -> Outcome:
    """Run the engine that the config names; sweep or repeat with `-m` or `--from`."""
    if call.flags.multirun and call.flags.run_folder is not None:
        raise ConfigError(
            f"--from {call.flags.run_folder} and -m: only one run at a time can be repeated; "
            "remove one of the two flags",
            code="cli.conflict",
        )
    if call.flags.restart and (call.flags.multirun or call.flags.run_folder is not None):
        raise ConfigError(
            "--restart: only a single run can be started over; a repetition and a sweep have new "
            "folders",
            code="cli.conflict",
        )
    if call.flags.multirun:
        return run_command("sweep", call)
    if call.flags.run_folder is not None:
        return run_command("rerun", call)
    if call.flags.restart:
        return _run_words(call, _add_word(call.overrides, "RUN.resume=restart", "--restart"))
    return _run_words(call, call.overrides)


def add_folder_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of commands that take a run folder."""
    parser.add_argument("--trust", action="store_true", help=TRUST)


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of commands that take a checkpoint of a run folder."""
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="latest (default), best, a name, or a path; same as RUN.checkpoint",
    )
    add_folder_flags(parser)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run folder."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", help="folder of the run")
    add_folder_flags(parser)


def run_resume(call: Call) -> Outcome:
    """Resume the run of a folder with its own config, and changes."""
    stored, words = _use_folder(call, "train")
    return _run_words(call, words, stored)


def _use_folder(call: Call, engine: str) -> "tuple[StoredConfig | None, list[str]]":
    """Return the config of the run folder among the words, if there is one, and the overrides."""
    flags = vars(call.flags)
    folder: str | None = flags.get("run_folder")
    changes = call.overrides
    if folder is None and "trust" in flags:
        folder, changes = _split_folder(changes)
    checkpoint = flags.get("checkpoint") or ""
    if folder is not None:
        from phasetrain.app.stored.stored_config import use_folder

        return use_folder(folder, engine, changes, checkpoint, trust=flags["trust"])
    if checkpoint:
        from phasetrain.config.compose.override_text import quote_value

        changes.append(f"RUN.checkpoint={quote_value(checkpoint)}")
    return None, changes


def _split_folder(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the first word that is neither an override nor a file, and the other words."""
    rest = list(words)
    for index, word in enumerate(words):
        if "=" not in word and not word.startswith("~") and not word.endswith((".yaml", ".yml")):
            return rest.pop(index), rest
    return None, rest


def _add_word(overrides: Sequence[str], word: str, setter: str) -> list[str]:
    """Return the overrides with another one; reject an override that contradicts it.

    Args:
        overrides: the given overrides.
        word: `SECTION.key=value`.
        setter: the flag or the command that sets it.
    """
    key = word.partition("=")[0]
    for override in overrides:
        # Hydra's prefixes + and ++ set the key as well
        if override.lstrip("+").startswith(f"{key}=") and override.lstrip("+") != word:
            raise ConfigError(
                f"{override}: {setter} sets {word}; remove one of the two", code="cli.conflict"
            )
    return [*overrides, word]


def run_engine(call: Call) -> Outcome:
    """Run the engine of a command, whatever RUN.engine says in a file.

    The first word may be a run folder, whose config is then taken.
    """
    engine = find_command(call.command).engine
    stored, changes = _use_folder(call, engine)
    if stored is not None:
        return _run_words(call, changes, stored)
    words = _add_word(changes, f"RUN.engine={engine}", f"the command {call.command}")
    return _run_words(call, words)


def _run_words(
    call: Call, overrides: Sequence[str], stored: "StoredConfig | None" = None
) -> Outcome:
    from phasetrain.app.engines import RanksNeededError, run_engine
    from phasetrain.config.compose.override_text import list_repeated

    try:
        result = run_engine(
            overrides,
            config_dir=call.flags.config_dir,
            clock=call.clock,
            stored=stored,
            owns_process=call.owns_process,
            warnings=list_repeated(call.overrides),
        )
    except RanksNeededError as needed:
        from phasetrain.app.local_launch import start_ranks

        # Rank 0 prints.
        return Outcome(start_ranks(needed.config, call.words), is_main=False)
    is_main = is_rank_0()
    # The history of a long run takes a while to read, and only the JSON object shows it.
    if call.flags.json and is_main:
        from phasetrain.app.api import with_history

        result = with_history(result)
    return Outcome(result.exit_code, content=result.to_json(), is_main=is_main)


def run_command(name: str, call: Call) -> Outcome:
    """Run another command with the words of this one.

    Raises:
        ConfigError: it belongs to an add-on that is not installed.
    """
    outcome: Outcome = import_object(find_command(name).run)(call)
    return outcome


def print_config(command: Command, call: Call) -> Outcome:
    """Print the resolved config of the overrides (`--cfg`)."""
    from omegaconf import OmegaConf

    from phasetrain.app.setup import resolve_config

    stored, words = None, None
    if command.config_words:
        words = import_object(command.config_words)(call)
    if words is None:
        words = call.overrides
        if call.command != "train":
            stored, words = _use_folder(call, command.engine)
    setup = resolve_config(words, config_dir=call.flags.config_dir, stored=stored)
    config = setup.config.plain()
    text = OmegaConf.to_yaml(OmegaConf.create(config))
    return Outcome(text=text, content={"config": config})


def is_rank_0() -> bool:
    """Return whether this process is rank 0."""
    from phasetrain.distributed import find_placement

    return find_placement(os.environ).rank == 0
