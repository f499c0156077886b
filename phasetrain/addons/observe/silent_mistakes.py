"""Warnings before the first step about mistakes that raise no error."""

from phasetrain.addons.observe.broadcast_loss import check_broadcast_loss
from phasetrain.addons.observe.effects_of_tests import check_effects_of_tests
from phasetrain.addons.observe.frozen_initial_weights import check_frozen_initial_weights
from phasetrain.addons.observe.ignored_targets import check_ignored_targets
from phasetrain.addons.observe.loss_in_parts import check_coupled_tests, check_loss_in_parts
from phasetrain.addons.observe.mirrored_points import check_mirrored_points
from phasetrain.addons.observe.unscheduled_steps import (
    check_unscheduled_steps,
    check_unused_advance,
)
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.tasks import Task


def warn_of_silent_mistakes(run_spec: RunSpec, task: Task) -> None:
    """Warn of losses that depend on how a batch or a test is computed or that broadcast outputs
    against targets, of mirrored key points, of schedules that nothing applies, of frozen weights
    with random values, and of tests that change the training.

    Every rank has to call this. The task keeps its state; the global generators move.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.
    """
    check_loss_in_parts(run_spec, task)
    check_coupled_tests(run_spec, task)
    check_broadcast_loss(run_spec, task)
    check_ignored_targets(run_spec, task)
    check_mirrored_points(run_spec)
    check_unscheduled_steps(run_spec, task)
    check_unused_advance(task)
    check_frozen_initial_weights(task)
    check_effects_of_tests(run_spec, task)
