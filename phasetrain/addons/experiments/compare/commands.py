"""The commands that compare two runs: `runs compare` and `runs diff`."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phasetrain.app.list_runs import summarize_run
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare two runs."""
    parser.add_argument("a", metavar="A", help="folder of a run, or path of its steps.ledger")
    parser.add_argument("b", metavar="B", help="the same of another run")


def run_compare(call: Call) -> Outcome:
    """Compare states, metrics, configs and ledgers of two runs."""
    from phasetrain.addons.experiments.compare.compare_runs import (
        compare_runs,
        reject_object_stores,
    )

    first, second = call.flags.a, call.flags.b
    if not call.flags.json:
        return Outcome(text=compare_runs(first, second))
    reject_object_stores(first, second)
    runs = [asdict(summarize_run(Path(path))) for path in (first, second) if Path(path).is_dir()]
    return Outcome(content={"runs": runs, "diff": _diff_content(first, second)})


def run_diff(call: Call) -> Outcome:
    """Find the first update and the component in which two runs differ."""
    from phasetrain.addons.experiments.compare.diff import diff

    if call.flags.json:
        content = _diff_content(call.flags.a, call.flags.b)
        return Outcome(int(not content["equal"]), content={"diff": content})
    difference = diff(call.flags.a, call.flags.b)
    return Outcome(int(not difference.equal), text=difference.report())


def _diff_content(one: str, other: str) -> dict[str, Any]:
    from phasetrain.addons.experiments.compare.diff import diff

    difference = diff(one, other)
    return {
        "equal": difference.equal,
        "update": difference.updates,
        "components": difference.components,
        "verdict": difference.verdict,
        "config": [
            {"key": change.path, "a": change.old, "b": change.new} for change in difference.config
        ],
        "environment": difference.environment,
        "data": difference.data,
        "code": difference.code,
        "notes": difference.notes,
    }
