"""The command `rerun`, and `recipes list`."""

import argparse
import io

from phasetrain.addons.experiments.options import Question
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call
from phasetrain.cli.train_commands import add_folder_flags, is_rank_0
from phasetrain.errors import ConfigError


def add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder of configs."""
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your configs")


def run_recipes_list(call: Call) -> Outcome:
    """List the recipes and their results."""
    from phasetrain.addons.experiments.recipes.pages import format_list, list_content
    from phasetrain.addons.experiments.recipes.recipe import read_recipes
    from phasetrain.config.compose.folders import find_config_dir

    recipes = read_recipes(find_config_dir(call.flags.config_dir))
    if call.flags.json:
        return Outcome(content={"recipes": list_content(recipes)})
    return Outcome(text=format_list(recipes))


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
    add_options(parser, Question)
    add_folder_flags(parser)


def _rerun_recipe(call: Call) -> Outcome:
    """Run a recipe and compare it with its measured results."""
    from phasetrain.addons.experiments.recipes.recipe import find_variant
    from phasetrain.addons.experiments.recipes.requirements import require_packages
    from phasetrain.addons.experiments.recipes.run_recipe import run_variant
    from phasetrain.addons.experiments.recipes.verdict import compare
    from phasetrain.app.engines import run_engine
    from phasetrain.config.compose.folders import find_config_dir
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
    question = read_options(Question, call.flags)
    if question != Question():
        return _answer_what_if(call, question)
    from phasetrain.addons.experiments.rerun import repeat
    from phasetrain.app.engines import RanksNeededError, print_log, run_engine
    from phasetrain.app.local_launch import start_ranks
    from phasetrain.runtime.terminal import Terminal

    is_main = is_rank_0()
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
        return Outcome(start_ranks(needed.config, call.words), is_main=False)
    content = {
        "original": call.flags.run_folder,
        "folder": verdict.folder,
        "bit_identical": verdict.is_identical,
        "verdict": verdict.text,
    }
    return Outcome(verdict.exit_code, text=verdict.text, content=content, is_main=is_main)


def _answer_what_if(call: Call, question: Question) -> Outcome:
    """Train a run again with a change, from the last checkpoint before it matters."""
    from phasetrain.addons.experiments.what_if import answer
    from phasetrain.app.engines import RanksNeededError, print_log, run_engine
    from phasetrain.app.local_launch import start_ranks
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    is_main = is_rank_0()
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
        return Outcome(start_ranks(needed.config, call.words), is_main=False)
    if receipt is None:
        text = ""  # other ranks than 0 have none either, whatever has become of the run
        if is_main:
            text = f"{result.folder} has not finished ({result.reason}); the same command continues"
        return Outcome(result.exit_code, text=text, content=result.to_json(), is_main=is_main)
    content = receipt.to_json()
    return Outcome(receipt.exit_code, text=receipt.to_text(), content=content, is_main=is_main)


def list_config_words(call: Call) -> list[str] | None:
    """Return the command line of the last stage of the recipe that a call repeats, for `--cfg`;
    None if it repeats a run."""
    if call.flags.recipe is None:
        return None
    from phasetrain.addons.experiments.recipes.recipe import find_variant
    from phasetrain.addons.experiments.recipes.run_recipe import last_words
    from phasetrain.config.compose.folders import find_config_dir

    _, variant = find_variant(call.flags.recipe, find_config_dir(call.flags.config_dir))
    return last_words(variant, call.flags.seed, _recipe_overrides(call))
