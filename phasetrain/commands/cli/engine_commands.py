"""The commands that work from a config: one for each engine, sweeps, repetitions and help."""

import argparse
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasetrain.commands.cli.output import Outcome
from phasetrain.commands.cli.parsing import TRUST, Call
from phasetrain.errors import ConfigError

if TYPE_CHECKING:
    from phasetrain.commands.stored.stored_config import StoredConfig

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
        return run_sweep(call)
    if call.flags.run_folder is not None:
        return run_rerun(call)
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
        from phasetrain.commands.stored.stored_config import use_folder

        return use_folder(folder, engine, changes, checkpoint, trust=flags["trust"])
    if checkpoint:
        from phasetrain.config.compose.override_text import quote_value

        changes.append(f"RUN.checkpoint={quote_value(checkpoint)}")
    return None, changes


def _split_folder(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the first word that is neither an override nor a file, and the other words."""
    rest = list(words)
    for place, word in enumerate(words):
        if "=" not in word and not word.startswith("~") and not word.endswith((".yaml", ".yml")):
            return rest.pop(place), rest
    return None, rest


def _add_word(overrides: Sequence[str], word: str, setter: str) -> list[str]:
    """Return the overrides with another one; reject an override that contradicts it.

    Args:
        overrides: the given overrides.
        word: `SECTION.key=value`.
        setter: the flag or the command that sets it.
    """
    key = word.partition("=")[0]
    for given in overrides:
        # Hydra's prefixes + and ++ set the key as well
        if given.lstrip("+").startswith(f"{key}=") and given.lstrip("+") != word:
            raise ConfigError(
                f"{given}: {setter} sets {word}; remove one of the two", code="cli.conflict"
            )
    return [*overrides, word]


def run_engine_named(engine: str) -> Callable[[Call], Outcome]:
    """Return a command that runs an engine, whatever RUN.engine says in a file.

    Its first word may be a run folder, whose config is then taken.
    """

    def run(call: Call) -> Outcome:
        stored, changes = _use_folder(call, engine)
        if stored is not None:
            return _run_words(call, changes, stored)
        words = _add_word(changes, f"RUN.engine={engine}", f"the command {call.command}")
        return _run_words(call, words)

    return run


def _run_words(
    call: Call, overrides: Sequence[str], stored: "StoredConfig | None" = None
) -> Outcome:
    from phasetrain.commands.engines import RanksNeededError, run_engine
    from phasetrain.commands.local_launch import launch_processes
    from phasetrain.config.compose.override_text import list_repeated

    try:
        result = run_engine(
            overrides,
            config_dir=call.flags.config_dir,
            clock=call.clock,
            stored=stored,
            warnings=list_repeated(call.overrides),
        )
    except RanksNeededError as needed:
        # Rank 0 prints.
        return Outcome(launch_processes(needed.processes, call.words), is_main=False)
    is_main = _is_main()
    # The history of a long run takes a while to read, and only the JSON object shows it.
    if call.flags.json and is_main:
        from phasetrain.commands.api import with_history

        result = with_history(result)
    return Outcome(result.exit_code, content=result.to_json(), is_main=is_main)


def add_rerun_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run folder, or the recipe."""
    parser.add_argument(
        "run_folder", metavar="RUN_FOLDER", nargs="?", help="folder of the original run"
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="run a recipe and compare it with its measured results; see `phasetrain recipes list`",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of the recipe (default: 0)"
    )
    parser.add_argument(
        "--first-epoch",
        action="store_true",
        help="stop after the first epoch, of the first stage if there are several, and compare "
        "the weights there",
    )
    parser.add_argument(
        "--without",
        metavar="IDS",
        action="append",
        help="what if: leave samples out; a file of ids, or ids such as 3,17",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        dest="settings",
        help="what if: change a key that a stage may change, see --from-update",
    )
    parser.add_argument(
        "--from-update", metavar="K", type=int, help="first update with the keys of --set"
    )
    parser.add_argument(
        "--keep-until", metavar="K", type=int, help="train all updates after update K again"
    )
    add_folder_flags(parser)


def _rerun_recipe(call: Call) -> Outcome:
    """Run a recipe and compare it with its measured results."""
    from phasetrain.commands.engines import run_engine
    from phasetrain.commands.recipes.facts import find_variant
    from phasetrain.commands.recipes.requirements import require_packages
    from phasetrain.commands.recipes.run_recipe import run_variant
    from phasetrain.commands.recipes.verdict import compare
    from phasetrain.config.compose.sources import find_config_dir
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    config_dir = find_config_dir(flags.config_dir)
    recipe, variant = find_variant(flags.recipe, config_dir)
    require_packages(recipe)
    terminal = Terminal()
    repetition = run_variant(
        variant,
        seed=flags.seed,
        overrides=_recipe_overrides(call),
        run=lambda words, hooks: run_engine(
            words, config_dir=config_dir, hooks=hooks, terminal=terminal
        ),
        first_epoch=flags.first_epoch,
    )
    verdict = compare(variant, repetition)
    return Outcome(verdict.exit_code, text=verdict.text, content=verdict.content)


def _recipe_overrides(call: Call) -> list[str]:
    """Return the overrides of a repetition of a recipe."""
    first = call.flags.run_folder
    if first is None:
        return call.overrides
    if "=" not in first:
        raise ConfigError(
            f"--recipe {call.flags.recipe} and {first}: repeat either a recipe or a run; remove "
            "one of the two",
            code="cli.conflict",
        )
    # argparse takes the first override for the folder
    return [first, *call.overrides]


def run_rerun(call: Call) -> Outcome:
    """Repeat a run in a new folder and compare every bit, or a recipe with its results."""
    if vars(call.flags).get("recipe") is not None:
        return _rerun_recipe(call)
    if call.flags.run_folder is None:
        raise ConfigError(
            "phasetrain rerun: expected the folder of a run, or --recipe NAME", code="cli.usage"
        )
    if any(vars(call.flags).get(name) is not None for name in _WHAT_IF):
        return _answer_what_if(call)
    from phasetrain.commands.engines import RanksNeededError, print_log, run_engine
    from phasetrain.commands.local_launch import launch_processes
    from phasetrain.commands.rerun import repeat
    from phasetrain.runtime.terminal import Terminal

    is_main = _is_main()
    terminal = Terminal() if is_main else Terminal(io.StringIO(), live=False)
    try:
        with print_log(terminal):
            verdict = repeat(
                call.flags.run_folder,
                call.overrides,
                run=lambda words, stored: run_engine(
                    words, config_dir=call.flags.config_dir, clock=call.clock, stored=stored
                ),
                trust=call.flags.trust,
            )
    except RanksNeededError as needed:
        return Outcome(launch_processes(needed.processes, call.words), is_main=False)
    content = {
        "original": call.flags.run_folder,
        "folder": verdict.folder,
        "bit_identical": verdict.is_identical,
        "verdict": verdict.text,
    }
    return Outcome(verdict.exit_code, text=verdict.text, content=content, is_main=is_main)


_WHAT_IF = ("without", "settings", "from_update", "keep_until")
"""Flags of `rerun` that ask about a change of a run."""


def _answer_what_if(call: Call) -> Outcome:
    """Train a run again with a change, from the last checkpoint before it matters."""
    from phasetrain.commands.engines import RanksNeededError, print_log, run_engine
    from phasetrain.commands.local_launch import launch_processes
    from phasetrain.commands.what_if import Question, answer
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    question = Question(
        tuple(flags.without or ()),
        tuple(flags.settings or ()),
        flags.from_update,
        flags.keep_until,
    )
    is_main = _is_main()
    terminal = Terminal() if is_main else Terminal(io.StringIO(), live=False)
    try:
        with print_log(terminal):
            result, receipt = answer(
                flags.run_folder,
                call.overrides,
                question,
                run=lambda words, stored: run_engine(
                    words, config_dir=flags.config_dir, clock=call.clock, stored=stored
                ),
                trust=flags.trust,
            )
    except RanksNeededError as needed:
        return Outcome(launch_processes(needed.processes, call.words), is_main=False)
    if receipt is None:
        text = ""  # other ranks than 0 have none either, whatever has become of the run
        if is_main:
            text = f"{result.folder} has not finished ({result.reason}); the same command continues"
        return Outcome(result.exit_code, text=text, content=result.to_json(), is_main=is_main)
    content = receipt.to_json()
    return Outcome(receipt.exit_code, text=receipt.to_text(), content=content, is_main=is_main)


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the certificate."""
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="certificate.json",
        help="certificate to write (default: certificate.json)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one kill, with the configured setting of MACHINE.deterministic only",
    )
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="train nothing; say whether device and versions are those of a certificate",
    )


def run_certify(call: Call) -> Outcome:
    """Kill and resume a shortened run of the config, compare every bit, and write a certificate."""
    from phasetrain.commands.certify.certify import Options, certify, check
    from phasetrain.commands.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    terminal = Terminal()
    with print_log(terminal):
        if flags.check is not None:
            found = check(flags.check, call.overrides, flags.config_dir)
        else:
            options = Options(flags.out, is_quick=flags.quick)
            found = certify(call.overrides, options, config_dir=flags.config_dir, terminal=terminal)
    return Outcome(found.exit_code, text=found.text, content=found.content)


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how configs are compared that folds or seeds repeat."""
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="SECTION.key=VALUE",
        help="the config that the others are compared with, instead of the best one; again for "
        "every swept key that tells it from others",
    )
    parser.add_argument(
        "--detect",
        type=float,
        metavar="DIFFERENCE",
        help="show how many seeds find a difference of this size in the metric",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print which updates the runs share (RUN.reuse_prefix), and start nothing",
    )


def run_sweep(call: Call) -> Outcome:
    """Run every combination of the swept values."""
    # Hydra's launchers are slow to import
    from phasetrain.commands.setup import resolve_config
    from phasetrain.commands.sweep import ComparisonSettings, sweep
    from phasetrain.commands.sweep.override_text import FOLDER_KEY, SweepOverrides

    if "RUN.resume=restart" in call.overrides:
        raise ConfigError(
            f"RUN.resume=restart: a sweep cannot start over; give it a new {FOLDER_KEY}=FOLDER",
            code="cli.conflict",
        )
    config_dir = call.flags.config_dir
    flags = vars(call.flags)  # `train -m` has no flags of sweeps
    comparison = ComparisonSettings(tuple(flags.get("baseline", ())), flags.get("detect"))
    code = sweep(
        call.overrides,
        config_dir=config_dir,
        check=lambda words: resolve_config(words, config_dir=config_dir).config,
        comparison=comparison,
        plan_only=vars(call.flags).get("plan", False),  # `-m` has no such flag
    )
    folder = SweepOverrides.read(call.overrides).resolve_folder()
    path = Path(folder, "results.json")
    results: dict[str, Any] = {}
    if call.flags.json and path.is_file():
        results = json.loads(path.read_bytes())
    return Outcome(code, content={"folder": folder, **results})


_ENGINES = {"resume": "train", "rerun": "train", "predict": "test"}
"""Command -> the value of RUN.engine with which it uses the config of a folder."""


def print_config(call: Call) -> Outcome:
    """Print the resolved config of the overrides (`--cfg`)."""
    from omegaconf import OmegaConf

    from phasetrain.commands.setup import resolve_config

    stored, words = None, call.overrides
    if call.command == "predict":
        call.flags.overrides = [word for word in words if "=" in word]  # without the files
    if vars(call.flags).get("recipe") is not None:
        words = _last_recipe_words(call)
    elif call.command != "train":
        stored, words = _use_folder(call, _ENGINES.get(call.command, call.command))
    setup = resolve_config(words, config_dir=call.flags.config_dir, stored=stored)
    config = setup.config.plain()
    text = OmegaConf.to_yaml(OmegaConf.create(config))
    return Outcome(text=text, content={"config": config})


def _last_recipe_words(call: Call) -> list[str]:
    """Return the command line of the last stage of the recipe that a call repeats."""
    from phasetrain.commands.recipes.facts import find_variant
    from phasetrain.commands.recipes.run_recipe import last_words
    from phasetrain.config.compose.sources import find_config_dir

    _, variant = find_variant(call.flags.recipe, find_config_dir(call.flags.config_dir))
    return last_words(variant, call.flags.seed, _recipe_overrides(call))


def _is_main() -> bool:
    """Return whether this process is rank 0."""
    from phasetrain.distributed import find_placement

    return find_placement(os.environ).rank == 0
