"""The parts of a run, built from its overrides without running it."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phasetrain.commands.setup import Setup, settle
from phasetrain.distributed import World
from phasetrain.engine.plan import Plan
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Task


@dataclass(frozen=True)
class Built:
    """What a run is made of.

    Attributes:
        setup: the settled config.
        plan: every phase.
        task: what is learned, with its parts.
    """

    setup: Setup
    plan: Plan
    task: Task


def settled(overrides: Sequence[str], config_dir: str | None = None) -> Setup:
    """Return the settled config of overrides, and print nothing."""
    return settle(overrides, config_dir=config_dir, terminal=Terminal(io.StringIO(), live=False))


def built(
    overrides: Sequence[str], config_dir: str | None = None, world: World | None = None
) -> Built:
    """Return what the run of these overrides is made of, as one process of `world` sees it."""
    setup = replace(settled(overrides, config_dir), world=world or World())
    builder = setup.builder()
    data = builder.data()
    plan = builder.plan(data)
    return Built(setup, plan, builder.task(builder.parts(data, plan)))
