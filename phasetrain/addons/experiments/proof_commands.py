"""The commands `certify`, `verify` and `judge`."""

import argparse

from phasetrain.addons.experiments.options import (
    CertifyOptions,
    JudgeOptions,
    VerifyOptions,
)
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the certificate."""
    add_options(parser, CertifyOptions)
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="train nothing; say whether device and versions are those of a certificate",
    )


def run_certify(call: Call) -> Outcome:
    """Kill and resume a shortened run of the config, compare every bit, and write a certificate."""
    from phasetrain.addons.experiments.certify.certify import certify, check
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    terminal = Terminal()
    with print_log(terminal):
        if flags.check is not None:
            return check(flags.check, call.overrides, flags.config_dir)
        options = read_options(CertifyOptions, flags)
        return certify(call.overrides, options, config_dir=flags.config_dir, terminal=terminal)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and amount."""
    parser.add_argument(
        "path",
        metavar="RUN_FOLDER|WEIGHTS",
        help="folder of a run, or weights from `phasetrain export` or `phasetrain pack`",
    )
    add_options(parser, VerifyOptions, exclusive=("fraction", "segments"))


def run_verify(call: Call) -> Outcome:
    """Check the ledger of a run, and train random segments of it again."""
    from phasetrain.addons.experiments.verify.verify import verify
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    with print_log(Terminal()):
        verification = verify(flags.path, read_options(VerifyOptions, flags))
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
    add_options(parser, JudgeOptions)


def run_judge(call: Call) -> Outcome:
    """Judge candidates by short runs and by pairs of runs."""
    from phasetrain.addons.experiments.judge.judge import judge
    from phasetrain.app.engines import print_log
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    with print_log(Terminal()):
        judgement = judge(flags.words, read_options(JudgeOptions, flags))
    return Outcome(judgement.exit_code, text=judgement.text, content=judgement.to_json())
