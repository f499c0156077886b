"""Logs the gradient norm (hook `gradient_norm`)."""

from phasetrain.engine.plan import Phase
from phasetrain.engine.step_logs import log
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.tasks.parts import MAIN_UPDATER


@HOOKS.register("gradient_norm")
class GradientNorm(Hook):
    """Logs the gradient norm of each update, before clipping, and its mean over a train phase.

    It is the Euclidean norm of the whole gradient, over all ranks, and logged as `gradient_norm`;
    that of a separate updater is `gradient_norm_LABEL`. A phase with a skipped update has no finite
    mean. Nothing waits for the device. Needs `OPTIMIZER.clip_norm`; 1e9 measures without clipping.
    """

    observe_only = True
    single = True

    def on_start(self, run: Run) -> None:
        """Check that there is a norm.

        Raises:
            ConfigError: nothing is clipped by its norm.
        """
        updaters = run.task.parts.updaters.values()
        if all(updater.gradients.settings.clip_norm is None for updater in updaters):
            raise ConfigError(
                "HOOKS.gradient_norm: the norm is only computed for clipping, and "
                "OPTIMIZER.clip_norm is null; set it, for example to 1e9, which no norm reaches",
                code="config.conflict",
            )

    def on_update(self, run: Run, phase: Phase) -> None:
        """Log the norms of this update."""
        for name, updater in run.task.parts.updaters.items():
            norm = updater.gradients.norm
            if norm is not None:
                log("gradient_norm" if name == MAIN_UPDATER else f"gradient_norm_{name}", norm)
