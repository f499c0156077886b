"""Builds the parts of a run from its overrides, without running it."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phasetrain.app.setup import Setup, resolve_config
from phasetrain.distributed import World
from phasetrain.engine.plan import Plan
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Task


@dataclass(frozen=True)
class BuiltRun:
    """The parts of a run.

    Attributes:
        setup: the resolved config.
        plan: all phases.
        task: the task, with model, loss and data.
    """

    setup: Setup
    plan: Plan
    task: Task


def resolve_overrides(overrides: Sequence[str], config_dir: str | None = None) -> Setup:
    """Return the resolved config of overrides, and print nothing."""
    return resolve_config(
        overrides, config_dir=config_dir, terminal=Terminal(io.StringIO(), live=False)
    )


def build_run(
    overrides: Sequence[str], config_dir: str | None = None, world: World | None = None
) -> BuiltRun:
    """Return the parts of a run, as one rank of `world` builds them."""
    setup = replace(resolve_overrides(overrides, config_dir), world=world or World())
    builder = setup.builder()
    data = builder.data()
    plan = builder.plan(data)
    return BuiltRun(setup, plan, builder.task(builder.parts(data, plan)))
