"""The conditions under which an update can be repeated bit for bit."""

from phasetrain.errors import ConfigError
from phasetrain.hooks.base import Hook, Run, overrides

STEP_EVENTS = (
    *("on_step_start", "on_batch", "on_forward"),
    *("on_backward", "on_skip", "on_update"),
)
"""Events in which a hook could change the result of an update."""


def check_run(run: Run, *, is_exact: bool) -> None:
    """Check that the parts of a run allow to repeat an update.

    Args:
        run: the run, before its first step.
        is_exact: RUN.exact.

    Raises:
        ConfigError: they do not.
    """
    if not run.task.parts.machine.deterministic:
        raise ConfigError(
            "HOOKS.recheck: MACHINE.deterministic = false lets the same update have other bits "
            "each time; set it to true, or remove the hook",
            code="recheck.not_deterministic",
        )
    if not is_exact:
        raise ConfigError(
            "HOOKS.recheck: RUN.exact = false allows parts whose state is not saved, so an update "
            "cannot be repeated; set it to true, or remove the hook",
            code="recheck.not_exact",
        )
    strategy = run.task.strategy
    if strategy.shards_weights or strategy.shards_optimizer:
        raise ConfigError(
            "HOOKS.recheck: the strategy shards weights or optimizer, and no rank can restore its "
            "state alone; set DISTRIBUTED.strategy=ddp, or remove the hook",
            code="recheck.sharded",
        )


def check_hooks(run: Run, own: Hook) -> None:
    """Check that no other hook may change the result of an update.

    Args:
        run: the run.
        own: the hook that repeats updates.

    Raises:
        ConfigError: one may.
    """
    is_later = False
    for label, hook in run.hooks.by_label.items():
        if hook is own:
            is_later = True
        if hook.observe_only:
            continue
        # Hooks that come later in HOOKS are called first in `on_step`.
        events = (*STEP_EVENTS, "on_step") if is_later else STEP_EVENTS
        used = [event for event in events if overrides(hook, event)]
        if used:
            raise ConfigError(
                f"HOOKS.{label}: it may change the result of an update in {used[0]}, and "
                "HOOKS.recheck repeats updates without hooks; set observe_only = True in its "
                "class if it does not, or remove one of the two",
                code="recheck.hook",
            )
