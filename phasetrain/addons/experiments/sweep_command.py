"""The command `sweep`, and the flag `-m` of `train`."""

import argparse
import json
from pathlib import Path
from typing import Any

from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call
from phasetrain.errors import ConfigError


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
    from phasetrain.addons.experiments.sweep import ComparisonSettings, sweep
    from phasetrain.addons.experiments.sweep.override_text import FOLDER_KEY, SweepOverrides
    from phasetrain.app.setup import resolve_config

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
