"""Warnings and errors before the first step about mistakes that raise no error by themselves."""

import logging

from torch import nn

from phasetrain.addons.observe.changed_buffers import check_changed_buffers
from phasetrain.addons.observe.ignored_targets import check_ignored_targets
from phasetrain.addons.observe.mirrored_points import check_mirrored_points
from phasetrain.addons.observe.whole_facts import check_whole_facts
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.losses import FunctionLoss
from phasetrain.proof.held import is_custom
from phasetrain.tasks import Task

log = logging.getLogger(__name__)


def warn_of_silent_mistakes(run_spec: RunSpec, task: Task) -> None:
    """Reject forward passes that call `backward()`, and warn of other mistakes.

    These are losses that depend on how a batch or a test is computed or that broadcast outputs
    against targets, padding that counts as a target, mirrored key points, statistics of held-out
    samples, schedules that nothing applies, frozen weights with random values, buffers that change
    although nothing should change them or by parts of a batch, rules of parameter groups that miss
    subclasses or select weights of model and loss by one name, and tests that change the training.

    Every rank has to call this. The task keeps its state; the global generators move.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.

    Raises:
        ConfigError: a forward pass leaves gradients, or a method replaces one by accident.
    """
    if is_custom(type(task)):
        from phasetrain.addons.observe.replaced_methods import check_replaced_methods

        check_replaced_methods(task)
    check_ignored_targets(run_spec, task)
    if any(split.section.collate != "stack" for split in run_spec.data.values()):
        from phasetrain.addons.observe.padded_targets import check_padded_targets

        check_padded_targets(run_spec, task)
    check_mirrored_points(run_spec)
    check_whole_facts(run_spec.data, task.parts.facts)
    if task.parts.weights is not None:
        from phasetrain.addons.observe.frozen_initial_weights import check_frozen_initial_weights

        check_frozen_initial_weights(task.parts.model, task.parts.weights)
    check_changed_buffers(run_spec, task)
    if not has_custom_parts(task):
        return
    from phasetrain.addons.observe.broadcast_loss import check_broadcast_loss
    from phasetrain.addons.observe.effects_of_tests import check_effects_of_tests
    from phasetrain.addons.observe.loss_in_parts import check_coupled_tests, check_loss_in_parts
    from phasetrain.addons.observe.missed_subclasses import check_missed_subclasses
    from phasetrain.addons.observe.own_backward import check_own_backward
    from phasetrain.addons.observe.shared_names import check_shared_names
    from phasetrain.addons.observe.unscheduled_steps import (
        check_unscheduled_steps,
        check_unused_advance,
    )

    check_own_backward(run_spec, task)
    check_unscheduled_steps(run_spec, task)
    check_unused_advance(task)
    check_missed_subclasses(run_spec, task)
    check_shared_names(run_spec, task)
    check_loss_in_parts(run_spec, task)
    check_coupled_tests(run_spec, task)
    check_broadcast_loss(run_spec, task)
    check_effects_of_tests(run_spec, task)


def warn_of_settings(model: nn.Module) -> None:
    """Warn of settings of modules that raise no error, as the modules of phasetrain's add-ons say
    in `list_mistakes()`."""
    for module in model.modules():
        if not is_custom(type(module)):
            for line in getattr(module, "list_mistakes", list)():
                log.warning("%s", line)


def has_custom_parts(task: Task) -> bool:
    """Return whether task, model or a loss is not one of phasetrain or torch."""
    roots = (task.parts.model, task.parts.loss, *task.parts.losses)
    modules = [module for root in roots for module in root.modules()]
    codes = {
        module.function if isinstance(module, FunctionLoss) else type(module) for module in modules
    }
    return any(map(is_custom, {type(task), *codes}))
