"""Experiments that exact runs allow: sweeps, judgements, forks, replays and proofs of runs."""

from phasetrain.config.addons import AddOn, Command, Engine

PACKAGE = "phasetrain.addons.experiments"
ENGINE_COMMANDS = "phasetrain.cli.train_commands"
SWEEP_COMMAND = f"{PACKAGE}.sweep_command"
RERUN_COMMAND = f"{PACKAGE}.rerun_command"
PROOF_COMMANDS = f"{PACKAGE}.proof_commands"
COMPARE_COMMANDS = f"{PACKAGE}.compare.commands"
BISECT_COMMAND = f"{PACKAGE}.bisect.command"
TRAVEL_COMMANDS = f"{PACKAGE}.travel.commands"
GOLDEN_COMMANDS = f"{PACKAGE}.golden.commands"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "runs compare",
            "A B",
            "compare states, metrics and configs of two runs, and where they diverge",
            f"{COMPARE_COMMANDS}:run_compare",
            arguments=f"{COMPARE_COMMANDS}:add_pair_arguments",
        ),
        Command(
            "runs diff",
            "A B",
            "find the first update at which two runs differ (exit code 0: identical, 1: different)",
            f"{COMPARE_COMMANDS}:run_diff",
            arguments=f"{COMPARE_COMMANDS}:add_pair_arguments",
        ),
        Command(
            "replay",
            "[RUN_FOLDER] RUN.step=N [OVERRIDE ...]",
            "run a past update again and compare it with the ledger",
            f"{ENGINE_COMMANDS}:run_engine",
            takes_overrides=True,
            arguments=f"{ENGINE_COMMANDS}:add_folder_flags",
            engine="replay",
        ),
        Command(
            "at",
            "RUN_FOLDER N",
            "restore the state just before update N, for a Python prompt or a script (exit code 1: "
            "it differs from the ledger)",
            f"{TRAVEL_COMMANDS}:run_at",
            arguments=f"{TRAVEL_COMMANDS}:add_at_arguments",
        ),
        Command(
            "order",
            "RUN_FOLDER --sample ID | --update N | --between A B | --sql SELECT",
            "list the samples of updates and the updates of samples, past and future (exit code 1: "
            "the ledger has other samples)",
            f"{TRAVEL_COMMANDS}:run_order",
            arguments=f"{TRAVEL_COMMANDS}:add_order_arguments",
        ),
        Command(
            "relog",
            "RUN_FOLDER [--hook FILE]",
            "log numbers of past updates with a hook that the run did not have",
            f"{TRAVEL_COMMANDS}:run_relog",
            arguments=f"{TRAVEL_COMMANDS}:add_relog_arguments",
        ),
        Command(
            "why",
            "RUN_FOLDER [--update U | --spike | --metric SPLIT/METRIC]",
            "prove which sample or setting made the loss rise: train the updates again without it "
            "(exit code 9: not found)",
            f"{TRAVEL_COMMANDS}:run_why",
            arguments=f"{TRAVEL_COMMANDS}:add_why_arguments",
        ),
        Command(
            "find-lr",
            "[OVERRIDE ...]",
            "find a learning rate with a range test",
            f"{ENGINE_COMMANDS}:run_engine",
            takes_overrides=True,
            engine="find_lr",
        ),
        Command(
            "find-batch-size",
            "[OVERRIDE ...]",
            "find the largest batch that fits into memory",
            f"{ENGINE_COMMANDS}:run_engine",
            takes_overrides=True,
            engine="find_batch_size",
        ),
        Command(
            "sweep",
            "SECTION.key=VALUE,VALUE ['RUN.seed=seeds(5)'] [OVERRIDE ...]",
            "run every combination of the given values; with several seeds, compare the configs",
            f"{SWEEP_COMMAND}:run_sweep",
            takes_overrides=True,
            arguments=f"{SWEEP_COMMAND}:add_sweep_arguments",
        ),
        Command(
            "rerun",
            "RUN_FOLDER | --recipe NAME [OVERRIDE ...]",
            "repeat a run, or a recipe, in a new folder and compare every bit",
            f"{RERUN_COMMAND}:run_rerun",
            takes_overrides=True,
            arguments=f"{RERUN_COMMAND}:add_rerun_arguments",
            config_words=f"{RERUN_COMMAND}:list_config_words",
        ),
        Command(
            "judge",
            "A B [CANDIDATE ...] [OVERRIDE ...]",
            "decide by runs whether B is identical to A, better or worse (exit code 8; undecided: "
            "9)",
            f"{PROOF_COMMANDS}:run_judge",
            arguments=f"{PROOF_COMMANDS}:add_judge_arguments",
        ),
        Command(
            "bisect",
            "GOOD BAD | --rev A..B [OVERRIDE ...]",
            "find the key changes, or the first commit, that make the difference (exit code 9: "
            "several commits remain)",
            f"{BISECT_COMMAND}:run_bisect",
            arguments=f"{BISECT_COMMAND}:add_bisect_arguments",
        ),
        Command(
            "verify",
            "RUN_FOLDER|WEIGHTS",
            "check the ledger of a run, and train random parts of it again (exit code 1: "
            "different; 9: undecided)",
            f"{PROOF_COMMANDS}:run_verify",
            arguments=f"{PROOF_COMMANDS}:add_verify_arguments",
        ),
        Command(
            "recipes list",
            "",
            "list the recipes: data, metric with its spread over seeds, minutes, status",
            f"{RERUN_COMMAND}:run_recipes_list",
            arguments=f"{RERUN_COMMAND}:add_recipes_arguments",
        ),
        Command(
            "certify",
            "[OVERRIDE ...]",
            "kill and resume the run on this machine and compare every bit (exit code 7: not "
            "identical)",
            f"{PROOF_COMMANDS}:run_certify",
            takes_overrides=True,
            arguments=f"{PROOF_COMMANDS}:add_certify_arguments",
        ),
        Command(
            "golden record",
            "[OVERRIDE ...]",
            "train a short run and write its digests to a file to commit",
            f"{GOLDEN_COMMANDS}:run_record",
            takes_overrides=True,
            arguments=f"{GOLDEN_COMMANDS}:add_record_arguments",
        ),
        Command(
            "golden check",
            "FILE [OVERRIDE ...]",
            "train a recorded run again and compare every digest (exit code 7: different; 9: no "
            "record for this platform)",
            f"{GOLDEN_COMMANDS}:run_check",
            takes_overrides=True,
            arguments=f"{GOLDEN_COMMANDS}:add_check_arguments",
            config_words=f"{GOLDEN_COMMANDS}:list_config_words",
        ),
    )
    addon.add_engines(
        Engine("replay", f"{PACKAGE}.replay.replay:replay", is_distributed=False),
        Engine("find_lr", f"{PACKAGE}.find.find_lr:find_lr", is_distributed=False),
        Engine(
            "find_batch_size",
            f"{PACKAGE}.find.find_batch_size:find_batch_size",
            is_distributed=False,
        ),
    )
    addon.add_section("FIND", f"{PACKAGE}.find.section:FindSection")
    addon.add_keys("RUN", f"{PACKAGE}.run_keys:RunKeys")
    addon.add_service("find_sources", f"{PACKAGE}.source_tree:find_sources")
    addon.add_service(
        "read_certificate",
        f"{PACKAGE}.certify.certificate:read_certificate",
    )
    addon.add_service("find_operators", f"{PACKAGE}.operators.preflight:find_operators")
    addon.add_service("find_spikes", f"{PACKAGE}.travel.spikes:find_spikes")
    addon.add_service("name_operators", f"{PACKAGE}.operators.preflight:name_operators")
    addon.add_service("resume_fork", f"{PACKAGE}.fork.resume_fork:resume_fork")
    addon.add_service("prepare_training", f"{PACKAGE}.run_keys:prepare_training")
