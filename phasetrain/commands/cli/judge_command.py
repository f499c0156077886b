"""The command `judge`."""

import argparse

from phasetrain.commands.cli.output import Outcome
from phasetrain.commands.cli.parsing import TRUST, Call


def add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the judgement."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="A B",
        help="a baseline and candidates: run folders, FILE.yaml, names of experiments, or an "
        'experiment with overrides in quotes ("wide.yaml OPTIMIZER.lr=0.05"); other overrides are '
        "for all of them",
    )
    parser.add_argument(
        "--rev",
        action="append",
        default=[],
        metavar="REVISION",
        help="judge revisions of your project, the first one is the baseline; with a single one "
        "the candidate is the working tree. The words are then the command that is run in each",
    )
    parser.add_argument(
        "--metric", default="", help="such as test/accuracy, or -test/loss if smaller is better"
    )
    parser.add_argument(
        "--value", choices=("last", "best"), default="last", help="value of each run: last or best"
    )
    parser.add_argument(
        "--short",
        type=int,
        default=20,
        metavar="N",
        help="updates that are compared bit by bit first (default: 20; 0: none)",
    )
    parser.add_argument(
        "--full", action="store_true", help="compare whole runs bit by bit if the first updates are"
    )
    parser.add_argument(
        "--d", type=float, metavar="D", help="smallest difference of the metric that matters"
    )
    parser.add_argument(
        "--error-rate",
        type=float,
        default=0.05,
        metavar="P",
        help="probability of any false verdict (default: 0.05)",
    )
    parser.add_argument(
        "--pairs", type=int, default=12, metavar="N", help="most pairs of runs (default: 12)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="use only runs that judge has trained itself"
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your configs")


def run_judge(call: Call) -> Outcome:
    """Judge candidates by short runs and by pairs of runs."""
    from phasetrain.commands.engines import print_log
    from phasetrain.commands.judge.judge import Settings, judge
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    settings = Settings(
        revisions=tuple(flags.rev),
        metric=flags.metric,
        which=flags.value,
        short=flags.short,
        is_full=flags.full,
        margin=flags.d,
        error_rate=flags.error_rate,
        most_pairs=flags.pairs,
        is_fresh=flags.fresh,
        config_dir=flags.config_dir,
        trust=flags.trust,
    )
    with print_log(Terminal()):
        found = judge(flags.words, settings)
    return Outcome(found.exit_code, text=found.text, content=found.to_json())
