"""The commands that work from a config: one for each engine, sweeps, repetitions and help."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phasetrain.commands.cli.output import Outcome
from phasetrain.commands.cli.parsing import Call
from phasetrain.errors import ConfigError

# The modules of the commands are imported in the functions that run them, because most of them
# import torch: `--help` and usage errors would take a second longer.


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `phasetrain` without a command."""
    parser.add_argument("-m", "--multirun", action="store_true", help="same as the command sweep")
    parser.add_argument(
        "--from", dest="run_folder", metavar="RUN_FOLDER", help="same as the command rerun"
    )


def run_train(call: Call) -> Outcome:
    """Run the engine that the config names; sweep or repeat with `-m` or `--from`."""
    if call.flags.multirun and call.flags.run_folder is not None:
        raise ConfigError(
            f"--from {call.flags.run_folder} and -m: only one run at a time can be repeated; "
            "remove one of the two flags",
            code="cli.conflict",
        )
    if call.flags.multirun:
        return run_sweep(call)
    if call.flags.run_folder is not None:
        return run_rerun(call)
    return _run_words(call, call.overrides)


def run_engine_named(engine: str) -> Callable[[Call], Outcome]:
    """Return a command that runs an engine, whatever RUN.engine says in a file."""

    def run(call: Call) -> Outcome:
        word = f"RUN.engine={engine}"
        for given in call.overrides:
            # Hydra's prefixes + and ++ set the key as well
            if given.lstrip("+").startswith("RUN.engine=") and given.lstrip("+") != word:
                raise ConfigError(
                    f"{given}: the command {call.command} sets {word}; remove one of the two",
                    code="cli.conflict",
                )
        return _run_words(call, [*call.overrides, word])

    return run


def _run_words(call: Call, overrides: Sequence[str]) -> Outcome:
    from phasetrain.commands.engines import run_engine

    result = run_engine(overrides, config_dir=call.flags.config_dir, clock=call.clock)
    is_main = _is_main()
    # The history of a long run takes a while to read, and only the JSON object shows it.
    if call.flags.json and is_main:
        from phasetrain.commands.api import with_history

        result = with_history(result)
    return Outcome(result.exit_code, content=result.to_json(), is_main=is_main)


def add_rerun_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run folder."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", help="folder of the original run")


def run_rerun(call: Call) -> Outcome:
    """Repeat a run in a new folder and compare every bit."""
    from phasetrain.commands.engines import print_log, run_engine
    from phasetrain.commands.rerun import repeat
    from phasetrain.runtime.terminal import Terminal

    with print_log(Terminal()):
        verdict = repeat(
            call.flags.run_folder,
            call.overrides,
            config_dir=call.flags.config_dir,
            run=lambda words, config_dir: run_engine(
                words, config_dir=config_dir, clock=call.clock
            ),
        )
    content = {
        "original": call.flags.run_folder,
        "folder": verdict.folder,
        "bit_identical": verdict.is_identical,
        "verdict": verdict.text,
    }
    return Outcome(verdict.exit_code, text=verdict.text, content=content, is_main=_is_main())


def run_sweep(call: Call) -> Outcome:
    """Run every combination of the swept values."""
    # Hydra's launchers are slow to import
    from phasetrain.commands.setup import resolve_config
    from phasetrain.commands.sweep import sweep
    from phasetrain.commands.sweep.override_text import SweepOverrides

    config_dir = call.flags.config_dir
    code = sweep(
        call.overrides,
        config_dir=config_dir,
        check=lambda words: resolve_config(words, config_dir=config_dir).config,
    )
    folder = SweepOverrides.read(call.overrides).resolve_folder()
    path = Path(folder, "results.json")
    results: dict[str, Any] = {}
    if call.flags.json and path.is_file():
        results = json.loads(path.read_bytes())
    return Outcome(code, content={"folder": folder, **results})


def print_config(call: Call) -> Outcome:
    """Print the resolved config of the overrides (`--cfg`)."""
    from omegaconf import OmegaConf

    from phasetrain.commands.setup import resolve_config

    config = resolve_config(call.overrides, config_dir=call.flags.config_dir).config.plain()
    text = OmegaConf.to_yaml(OmegaConf.create(config))
    return Outcome(text=text, content={"config": config})


def _is_main() -> bool:
    """Return whether this process is rank 0."""
    from phasetrain.distributed import find_placement

    return find_placement(os.environ).rank == 0
