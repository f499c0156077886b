"""The commands `certify`, `verify` and `judge`."""

import argparse

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import TRUST, Call


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
    from phasetrain.addons.experiments.certify.certify import Options, certify, check
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    terminal = Terminal()
    with print_log(terminal):
        if flags.check is not None:
            outcome = check(flags.check, call.overrides, flags.config_dir)
        else:
            options = Options(flags.out, is_quick=flags.quick)
            outcome = certify(
                call.overrides, options, config_dir=flags.config_dir, terminal=terminal
            )
    return Outcome(outcome.exit_code, text=outcome.text, content=outcome.content)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and amount."""
    parser.add_argument(
        "path",
        metavar="RUN_FOLDER|WEIGHTS",
        help="folder of a run, or weights from `phasetrain export` or `phasetrain pack`",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--fraction",
        type=float,
        default=0.05,
        help="share of the updates to train again (default: 0.05)",
    )
    amount.add_argument(
        "--segments", type=int, metavar="N", help="number of segments between kept checkpoints"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the choice of segments (default: unpredictable)"
    )
    parser.add_argument(
        "--run",
        default="",
        metavar="RUN_FOLDER",
        help="run that the weights are from (default: the run folder that contains them)",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)


def run_verify(call: Call) -> Outcome:
    """Check the ledger of a run, and train random segments of it again."""
    from phasetrain.addons.experiments.verify.verify import VerifyOptions, verify
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    options = VerifyOptions(flags.fraction, flags.segments, flags.seed, flags.run, flags.trust)
    with print_log(Terminal()):
        verification = verify(flags.path, options)
    return Outcome(
        verification.exit_code, text=verification.format_text(), content=verification.to_json()
    )


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
    from phasetrain.addons.experiments.judge.judge import Settings, judge
    from phasetrain.app.engines import print_log
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
        judgement = judge(flags.words, settings)
    return Outcome(judgement.exit_code, text=judgement.text, content=judgement.to_json())
