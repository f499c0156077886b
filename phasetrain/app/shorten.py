"""Shortens a run, so that it can be repeated with kills."""

import io
from collections.abc import Sequence

from phasetrain.app.setup import resolve_config
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.compose.override_text import format_literal
from phasetrain.config.stages import LENGTHS
from phasetrain.engine.plan import Plan
from phasetrain.runtime.terminal import Terminal

TRAIN_STEPS = 3
TEST_STEPS = 2
EPOCHS = 2
"""Size of the shortened run: updates per epoch, batches per test, and epochs."""


def shortening_overrides(overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Return overrides that shorten a run to two epochs with tests, without scheduled saves."""
    silent = Terminal(io.StringIO(), live=False)
    return shorten_config(resolve_config(overrides, config_dir=config_dir, terminal=silent).config)


def shorten_config(config: AttrDict) -> list[str]:
    """Return the overrides that shorten a run with this config, see `shortening_overrides`."""
    phases = config.PHASES
    # The other units of length are reset: only one may be set.
    words = ["PHASES.updates=null", "PHASES.samples=null", "PHASES.test_every.epochs=1"]
    if phases.stages:
        stages = [
            {key: value for key, value in stage.items() if key not in LENGTHS} | {"epochs": 1}
            for stage in config.plain()["PHASES"]["stages"]
        ]
        words += ["PHASES.epochs=null", f"PHASES.stages={format_literal(stages, 'PHASES.stages')}"]
    else:
        words.append(f"PHASES.epochs={EPOCHS}")
    if phases.test_every.updates is not None:
        words.append(f"PHASES.test_every.updates={min(phases.test_every.updates, TRAIN_STEPS - 1)}")
    for split, most in (("train", TRAIN_STEPS), ("test", TEST_STEPS)):
        words.append(f"PHASES.limit.{split}={min(phases.limit[split] or most, most)}")
    return [
        *words,
        "RUN.engine=train",
        "RUN.resume=auto",
        "CHECKPOINT.every_updates=null",
        "CHECKPOINT.at_end=true",
    ]


def steps_before(plan: Plan, phase: int) -> int:
    """Return the number of train and test steps in the phases before one."""
    return int(plan.phases[:phase].column("steps").sum())
