"""The table of commands, from which parsing, `--help` and the reference table are made."""

import argparse
import shutil
import sys

from phasetrain.commands.cli import editor_commands as editor
from phasetrain.commands.cli import engine_commands as engine
from phasetrain.commands.cli import file_commands as files
from phasetrain.commands.cli import judge_command as judge
from phasetrain.commands.cli import model_commands as models
from phasetrain.commands.cli import text_commands as texts
from phasetrain.commands.cli.output import Outcome
from phasetrain.commands.cli.parsing import Call, Command

USAGE = "phasetrain [COMMAND] [flags] [FILE.yaml] [SECTION=GROUP] [SECTION.key=value ...]"


_ARGUMENTS = {"completion": ("bash", "zsh")}
"""Command -> words that it takes, for completion."""


def _add_help_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topic",
        nargs="*",
        metavar="TOPIC",
        help="a section, a key (OPTIMIZER.lr or lr), a part (cosine) or a command",
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your configs")


def _run_help(call: Call) -> Outcome:
    topic = " ".join(call.flags.topic)
    by_name = {command.name: command for command in COMMANDS}
    if topic in by_name:
        text = by_name[topic].parser().format_help().rstrip()
    elif list_group(topic):
        text = "\n\n".join(
            f"{command.parser().format_usage().rstrip()}\n  {command.help}"
            for command in list_group(topic)
        )
    else:
        # imports every registry of parts, and with them torch
        from phasetrain.commands.help import general_help, topic_help, wrap_help

        if topic:
            text = topic_help(topic)
        else:
            text = general_help(f"{USAGE}\n\n{list_commands()}", call.flags.config_dir)
        if sys.stdout.isatty():
            text = wrap_help(text, shutil.get_terminal_size().columns)
    return Outcome(text=text, content={"text": text})


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")


def _run_completion(call: Call) -> Outcome:
    from phasetrain.commands.editor.completion import CommandWords, completion_script

    commands = [
        CommandWords(
            command.name,
            # private: argparse has no public list of its flags
            tuple(word for one in command.parser()._actions for word in one.option_strings),
            takes_folder="RUN" in command.synopsis.split(".")[0] or command.synopsis == "A B",
            takes_overrides=command.takes_overrides,
            arguments=_ARGUMENTS.get(command.name, ()),
        )
        for command in COMMANDS
    ]
    flags = call.flags
    text = completion_script(flags.shell, commands, call.overrides, flags.config_dir)
    return Outcome(text=text, content={"text": text})


COMMANDS = (
    Command(
        "train",
        "[OVERRIDE ...]",
        "start or resume training; the default command",
        engine.run_train,
        takes_overrides=True,
        add_arguments=engine.add_train_arguments,
    ),
    Command(
        "resume",
        "RUN_FOLDER [OVERRIDE ...]",
        "resume the run of a folder with its own config, or with changes of it",
        engine.run_resume,
        takes_overrides=True,
        add_arguments=engine.add_resume_arguments,
    ),
    Command(
        "plan",
        "[RUN_FOLDER] [OVERRIDE ...]",
        "show the phases, learning rates, checkpoints and memory of a run before it starts",
        engine.run_engine_named("plan"),
        takes_overrides=True,
        add_arguments=engine.add_folder_flags,
    ),
    Command(
        "test",
        "[RUN_FOLDER] [OVERRIDE ...]",
        "test a checkpoint of a run on every test split",
        engine.run_engine_named("test"),
        takes_overrides=True,
        add_arguments=engine.add_checkpoint_flags,
    ),
    Command(
        "predict",
        "RUN_FOLDER|MODEL.zip FILE... [OVERRIDE ...]",
        "predict for images, arrays, tables or text with the model of a run, or a packed one",
        models.run_predict,
        takes_overrides=True,
        add_arguments=models.add_predict_arguments,
    ),
    Command(
        "generate",
        "RUN_FOLDER|MODEL.zip [--prompt TEXT ...] [OVERRIDE ...]",
        "continue texts with the language model of a run",
        texts.run_generate,
        takes_overrides=True,
        add_arguments=texts.add_generate_arguments,
    ),
    Command(
        "extract",
        "[RUN_FOLDER] [OVERRIDE ...]",
        "write features and predictions for every sample",
        engine.run_engine_named("extract"),
        takes_overrides=True,
        add_arguments=engine.add_checkpoint_flags,
    ),
    Command(
        "replay",
        "[RUN_FOLDER] RUN.step=N [OVERRIDE ...]",
        "run a past update again and compare it with the ledger",
        engine.run_engine_named("replay"),
        takes_overrides=True,
        add_arguments=engine.add_folder_flags,
    ),
    Command(
        "find-lr",
        "[OVERRIDE ...]",
        "find a learning rate with a range test",
        engine.run_engine_named("find_lr"),
        takes_overrides=True,
    ),
    Command(
        "find-batch-size",
        "[OVERRIDE ...]",
        "find the largest batch that fits into memory",
        engine.run_engine_named("find_batch_size"),
        takes_overrides=True,
    ),
    Command(
        "sweep",
        "SECTION.key=VALUE,VALUE ['RUN.seed=seeds(5)'] [OVERRIDE ...]",
        "run every combination of the given values; with several seeds, compare the configs",
        engine.run_sweep,
        takes_overrides=True,
        add_arguments=engine.add_sweep_arguments,
    ),
    Command(
        "rerun",
        "RUN_FOLDER | --recipe NAME [OVERRIDE ...]",
        "repeat a run, or a recipe, in a new folder and check that it gives the same",
        engine.run_rerun,
        takes_overrides=True,
        add_arguments=engine.add_rerun_arguments,
    ),
    Command(
        "judge",
        "A B [CANDIDATE ...] [OVERRIDE ...]",
        "decide by runs whether B is identical to A, better or worse (exit code 8; undecided: 9)",
        judge.run_judge,
        add_arguments=judge.add_judge_arguments,
    ),
    Command(
        "verify",
        "RUN_FOLDER|WEIGHTS",
        "check the ledger of a run, and train random parts of it again (exit code 1: different)",
        files.run_verify,
        add_arguments=files.add_verify_arguments,
    ),
    Command(
        "recipes list",
        "",
        "list the recipes: data, metric with its spread over seeds, minutes, status",
        files.run_recipes_list,
        add_arguments=files.add_recipes_arguments,
    ),
    Command(
        "certify",
        "[OVERRIDE ...]",
        "prove here that the run resumes bit-identically after kills (exit code 7: it does not)",
        engine.run_certify,
        takes_overrides=True,
        add_arguments=engine.add_certify_arguments,
    ),
    Command(
        "runs list",
        "[FOLDER]",
        "list runs: state, progress, best metric, time left, last error",
        files.run_list,
        add_arguments=files.add_list_arguments,
    ),
    Command(
        "runs follow",
        "RUN",
        "print log and progress of a run until it ends",
        files.run_follow,
        add_arguments=files.add_follow_arguments,
    ),
    Command(
        "runs compare",
        "A B",
        "compare states, metrics and configs of two runs, and where they diverge",
        files.run_compare,
        add_arguments=files.add_pair_arguments,
    ),
    Command(
        "runs diff",
        "A B",
        "find the first update at which two runs differ (exit code 0: identical, 1: different)",
        files.run_diff,
        add_arguments=files.add_pair_arguments,
    ),
    Command(
        "report",
        "RUN_FOLDER...",
        "write the HTML report of a run, or of several runs compared",
        files.run_report,
        add_arguments=files.add_report_arguments,
    ),
    Command(
        "export",
        "RUN OUT [OVERRIDE ...]",
        "write weights or a model from a checkpoint: safetensors, Hugging Face, torch.export, ONNX",
        models.run_export,
        takes_overrides=True,
        add_arguments=models.add_export_arguments,
    ),
    Command(
        "pack",
        "RUN MODEL.zip",
        "write a model with transforms, class names, an example and a card to one file",
        models.run_pack,
        add_arguments=models.add_pack_arguments,
    ),
    Command(
        "probe",
        "--train FOLDER --test FOLDER --layer LAYER",
        "evaluate extracted features with nearest neighbours and a linear classifier",
        files.run_probe,
        add_arguments=files.add_probe_arguments,
    ),
    Command(
        "cluster",
        "FOLDER... --layer LAYER --clusters K",
        "label samples by k-means of extracted features",
        files.run_cluster,
        add_arguments=files.add_cluster_arguments,
    ),
    Command(
        "consolidate",
        "CHECKPOINT OUT",
        "write a sharded checkpoint as one safetensors file",
        files.run_consolidate,
        add_arguments=files.add_consolidate_arguments,
    ),
    Command(
        "tokenize",
        "OUT INPUT...",
        "write texts as token files for the dataset tokens",
        texts.run_tokenize,
        add_arguments=texts.add_tokenize_arguments,
    ),
    Command(
        "migrate vissl",
        "CONFIG.yaml... [--out FILE.yaml]",
        "convert a VISSL config to an experiment, with a report on each key",
        files.run_migrate_vissl,
        add_arguments=files.add_migrate_arguments,
    ),
    Command(
        "new",
        "PATH",
        "start a project: an experiment, parts with a test, and the schema for editors",
        editor.run_new,
        add_arguments=editor.add_new_arguments,
    ),
    Command(
        "schema",
        "[--out FILE] [OVERRIDE ...]",
        "write a JSON Schema of experiments, with which editors complete and check keys",
        editor.run_schema,
        takes_overrides=True,
        add_arguments=editor.add_schema_arguments,
    ),
    Command(
        "completion",
        "SHELL [OVERRIDE ...]",
        "print a script with which bash or zsh complete keys, parts, values and run folders",
        _run_completion,
        takes_overrides=True,
        add_arguments=_add_completion_arguments,
    ),
    Command(
        "help",
        "[TOPIC]",
        "show this help, or help on a section, a key, a part or a command",
        _run_help,
        add_arguments=_add_help_arguments,
    ),
)
"""All commands; the first is the default."""


def list_group(name: str) -> list[Command]:
    """Return the commands of two words that begin with a word which is no command itself."""
    if any(command.name == name for command in COMMANDS):
        return []
    return [command for command in COMMANDS if command.name.startswith(f"{name} ")]


def list_commands() -> str:
    """Return the commands as lines of `--help`."""
    rows = [f"  {command.name:<16} {command.help}" for command in COMMANDS]
    return "\n".join(["commands", *rows])


def reference_table() -> str:
    """Return the commands as a Markdown table, for the docs."""
    rows = [
        f"| `{' '.join(('phasetrain', command.name, command.synopsis)).rstrip()}` "
        f"| {command.help} |"
        for command in COMMANDS
    ]
    return "\n".join(["| command | purpose |", "|---|---|", *rows])
