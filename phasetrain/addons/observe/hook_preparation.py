"""What the hooks of a run need before its first step."""

from phasetrain.addons.observe.hook_rehearsal import rehearse_hooks
from phasetrain.addons.observe.worker_copies import follow_changes, warn_of_set_epoch
from phasetrain.app.setup import Setup
from phasetrain.engine.loop import PhaseEngine
from phasetrain.hooks import Hooks
from phasetrain.tasks import Task


def prepare_hooks(engine: PhaseEngine[Task, Hooks], setup: Setup, *, is_rehearsed: bool) -> None:
    """Rehearse the hooks, and let workers follow the changes that they make to datasets.

    Args:
        engine: the run, before its first step.
        setup: its config.
        is_rehearsed: the run is new, and has the loop of phasetrain.

    Raises:
        ConfigError: see `rehearse_hooks`.
    """
    if is_rehearsed:
        warn_of_set_epoch(engine.task, engine.hooks.by_label)
        rehearse_hooks(engine, setup)
    # After the rehearsal, whose copy reads without workers.
    follow_changes(engine.task, engine.hooks.by_label)
