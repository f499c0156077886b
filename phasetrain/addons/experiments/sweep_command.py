"""The command `sweep`, and the flag `-m` of `train`."""

import argparse
import json
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.options import ComparisonSettings
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call
from phasetrain.errors import ConfigError


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how configs are compared that folds or seeds repeat."""
    add_options(parser, ComparisonSettings)
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print which updates the runs share (RUN.reuse_prefix), and start nothing",
    )


def run_sweep(call: Call) -> Outcome:
    """Run every combination of the swept values."""
    # Hydra's launchers are slow to import
    from phasetrain.addons.experiments.sweep import sweep
    from phasetrain.addons.experiments.sweep.override_text import FOLDER_KEY, SweepOverrides
    from phasetrain.app.setup import resolve_config

    if "RUN.resume=restart" in call.overrides:
        raise ConfigError(
            f"RUN.resume=restart: a sweep cannot start over; give it a new {FOLDER_KEY}=FOLDER",
            code="cli.conflict",
        )
    config_dir = call.flags.config_dir
    code = sweep(
        call.overrides,
        config_dir=config_dir,
        check=lambda words: resolve_config(words, config_dir=config_dir).config,
        # `train -m` has no flags of sweeps.
        comparison=read_options(ComparisonSettings, call.flags),
        plan_only=vars(call.flags).get("plan", False),
    )
    folder = SweepOverrides.read(call.overrides).resolve_folder()
    path = Path(folder, "results.json")
    results: dict[str, Any] = {}
    if call.flags.json and path.is_file():
        results = json.loads(path.read_bytes())
    return Outcome(code, content={"folder": folder, **results})
