"""Checks of a run whose parts and hooks are complete, just before its first step."""

from phasetrain.addons.observe.silent_mistakes import warn_of_settings
from phasetrain.addons.observe.worker_copies import follow_changes, warn_of_set_epoch
from phasetrain.app.setup import Setup
from phasetrain.engine.loop import PhaseEngine
from phasetrain.hooks import Hooks
from phasetrain.proof.held import find_holders, is_custom
from phasetrain.tasks import Task


def prepare_hooks(engine: PhaseEngine[Task, Hooks], setup: Setup, *, is_rehearsed: bool) -> None:
    """Rehearse the hooks, reject or report parts that a run or its resume would use otherwise than
    their code says, and let workers follow the changes that hooks make to datasets.

    Args:
        engine: the run, before its first step.
        setup: its config.
        is_rehearsed: the run is new, and has the loop of phasetrain.

    Raises:
        ConfigError: see `check_replaced_methods` and `rehearse_hooks`.
    """
    task, hooks = engine.task, engine.hooks.by_label
    if is_rehearsed:
        warn_of_settings(task.parts.model)
        warn_of_set_epoch(task, hooks)
    if task.parts.weights is not None:
        from phasetrain.addons.observe.unfinished_sources import check_unfinished_sources

        check_unfinished_sources(task.parts.weights)
    # The imports take a while, and most runs have no code of the user in these places. Ranks decide
    # alike, because a hook may exist on rank 0 only.
    is_plain = all(type(hook).__module__.startswith("phasetrain.") for hook in hooks.values())
    if (
        is_plain
        and setup.world.is_single_process
        and not is_custom(type(task))
        and not find_holders(hooks.items())
    ):
        return
    from phasetrain.addons.observe.dropped_logs import warn_of_dropped_logs
    from phasetrain.addons.observe.held_out_samples import warn_of_held_out_samples
    from phasetrain.addons.observe.hook_rehearsal import rehearse_hooks
    from phasetrain.addons.observe.lost_rows import warn_of_lost_rows
    from phasetrain.addons.observe.read_once import watch_read_once
    from phasetrain.addons.observe.replaced_methods import check_replaced_methods
    from phasetrain.addons.observe.start_values import add_start_values

    values = add_start_values(engine, setup)
    check_replaced_methods(task)
    if is_rehearsed:
        warn_of_held_out_samples(task, hooks)
        rehearse_hooks(engine, setup, values)
    warn_of_lost_rows(engine)
    # After the rehearsal, whose copy reads without workers.
    follow_changes(task, hooks)
    configs = setup.stages or (setup.config,)
    watch_read_once(task, hooks, [config.DATA for config in configs])
    warn_of_dropped_logs()
