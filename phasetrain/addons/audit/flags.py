"""The flags of an audit, for `phasetrain audit` and for `python -m phasetrain.addons.audit`."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from phasetrain.addons.audit.auditor import ENDING_SIGNALS, Audit, audit
from phasetrain.addons.audit.page import write_page
from phasetrain.addons.audit.runs import CannotAuditError


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; `behind` are the words behind `--`, the command."""
    parser.add_argument(
        "--resume",
        metavar="COMMAND",
        help="command that resumes, in quotes; {ckpt} in it is the newest checkpoint, {ckpt_dir} "
        "its folder (default: the same command again)",
    )
    parser.add_argument(
        "--kill-at",
        type=int,
        metavar="N",
        help="kill after this update (default: in the middle between two checkpoints)",
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=0,
        metavar="N",
        help="end every run after this many updates (default: when the script ends)",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="limit of a run (600)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one kill and one resume, and no further questions"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with the curves")
    parser.epilog = (
        "COMMAND is the training, such as `python train.py`; {run} in it is a new folder per run, "
        "for scripts that write elsewhere than to their working folder."
    )
    parser.set_defaults(behind=[])


def audit_with_flags(flags: argparse.Namespace) -> Audit:
    """Audit the command of parsed flags; say on standard error what is being run."""
    # So that what was started is ended, its folders are removed, and the verdict says why.
    previous = {number: signal.signal(number, _interrupt) for number in ENDING_SIGNALS}
    try:
        result = audit(
            flags.behind,
            resume=flags.resume,
            kill_at=flags.kill_at,
            updates=flags.updates,
            timeout=flags.timeout,
            quick=flags.quick,
            report=_report,
        )
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if flags.html:
        write_page(result, flags.behind, Path(flags.html))
    return result


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise CannotAuditError(f"{signal.Signals(number).name} has ended the audit")


def _report(line: str) -> None:
    sys.stderr.write(f"{line} ...\n")
