"""A check for tests that change the training: a loss, model or task changes state in a test that
later updates read."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.proof.digest import digest_leaves
from phasetrain.proof.held import Saved, read_key
from phasetrain.runtime.format import join_first
from phasetrain.tasks import SavedTask, Task
from phasetrain.tasks.dry_run import preserve_state
from phasetrain.tasks.parts import StepEvents

log = logging.getLogger(__name__)

MAX_NAMES = 4
"""Number of names in a warning."""


def check_effects_of_tests(run_spec: RunSpec, task: Task) -> None:
    """Warn if a test changes the training after it.

    One batch of each test split is measured. If this changes a parameter, a buffer, or state that
    the task adds to `stateful`, an update that follows such a test is computed with the test before
    it and without, from the same state of a task that is thrown away; the warning comes if losses
    or weights differ. An effect that only later updates have is not found.

    Nothing is compared if weights are sharded.
    Every rank has to call this. The task keeps its state, except for parameters that a test
    changes; the global generators move.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.
    """
    if task.shards_weights:
        return
    followed = list_followed_tests(run_spec.plan)
    changed: dict[str, None] = {}
    for test in {test.split: test for test, _ in followed}.values():
        names: list[str] = []
        try:
            with run_spec.machine.apply_settings():
                names = _list_changes(task, test, run_spec.plan)
        except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
            log.debug("%s is not tested: %s: %s", test.split, type(error).__name__, error)
        changed |= dict.fromkeys(
            name for part in task.parts.world.all_gather(names) for name in part
        )
    if not changed:
        return
    affected = None
    try:
        affected = _find_affected(run_spec, followed)
    except Exception as error:  # noqa: BLE001 - the rehearsal or the run reports it
        log.debug("the training after a test is not compared: %s: %s", type(error).__name__, error)
    verdict = next(filter(None, task.parts.world.all_gather(affected)), None)
    if verdict is None:
        return
    split, updates = verdict
    log.warning(
        "PHASES: tests change the training: a batch of %s changes %s, and update %d has another "
        "result with this test before it than without. So the weights depend on when and how much "
        "is tested. Change such state `if self.training:` only (in a task, `if "
        "self.model.training:`), or keep other state for tests",
        split,
        join_first(changed, MAX_NAMES),
        updates + 1,
    )


def list_followed_tests(plan: Plan) -> list[tuple[Phase, Phase]]:
    """Return a test of each split, without averaged weights, and the train phase that follows it;
    also a test in the middle of an epoch, after which a task may have state of earlier batches."""
    phases = plan.phases
    trained = np.flatnonzero(phases.is_train)
    tests = np.flatnonzero(~phases.is_train)
    after = np.searchsorted(trained, tests)
    tests, after = tests[after < len(trained)], after[after < len(trained)]
    splits = phases.column("split")[tests]
    is_inside = phases.column("first")[trained[after]] > 0
    firsts: set[int] = set()
    for split in np.unique(splits):
        for is_wanted in (splits == split, (splits == split) & is_inside):
            firsts.update(np.flatnonzero(is_wanted)[:1].tolist())
    pairs = [(phases[int(tests[at])], phases[int(trained[after[at]])]) for at in sorted(firsts)]
    return [(test, train) for test, train in pairs if not test.weights and test.steps]


def _list_changes(task: Task, test: Phase, plan: Plan) -> list[str]:
    """Return the values that a batch of a test changes, with the section of its part."""
    task.begin(test, fresh=True)
    with preserve_state(task):
        before = _read_state(task)
        _measure_batch(task, test, plan)
        after = _read_state(task)
    for meter in task.meters.values():
        meter.reset()
    return [name for name in after if before.get(name) != after[name]]


def _read_state(task: Task) -> dict[str, Any]:
    """Return keys of values that training may read, by the texts that name it."""
    parts = task.parts
    state: dict[str, Any] = {}
    losses = nn.ModuleList(parts.losses or [parts.loss])
    for section, module in (("MODEL", parts.model), *(("LOSS", loss) for loss in losses)):
        for kind, tensors in (
            ("parameter", module.named_parameters()),
            ("buffer", module.named_buffers()),
        ):
            for name, tensor in tensors:
                # A sample of a parameter: an update of one in a test moves all of its entries.
                is_whole = kind == "buffer"
                key = read_key(tensor, Saved(), is_whole=is_whole)
                state[f"the {kind} `{name}` of {section}"] = key
    inherited = Task.stateful(task)
    for name, part in task.stateful().items():
        if name not in inherited:
            state[f"`{name}` in `stateful()` of TASK"] = digest_leaves(part.state_dict(), name)
    return state


def _find_affected(
    run_spec: RunSpec, followed: list[tuple[Phase, Phase]]
) -> tuple[str, int] | None:
    """Return the split of a test that changes the update after it, and the updates before it."""
    plan = run_spec.plan
    builder = run_spec.builder
    task = builder.task(builder.parts(run_spec.data, plan, fresh=False))
    first = plan.first_training
    assert first is not None, "a train phase follows a test"
    try:
        with run_spec.machine.apply_settings():
            _train_batch(task, first, plan)  # so that there is state of the training
            saved = _copy_state(task)

            def compute(train: Phase, test: Phase | None = None) -> Any:
                task.restore(deepcopy(saved))  # an optimizer updates the tensors that it loads
                if test is not None:
                    task.begin(test, fresh=True)
                    _measure_batch(task, test, plan)
                    with suppress(ArithmeticError, IndexError, RuntimeError, ValueError):
                        task.measure(test)  # of a few samples
                return _train_batch(task, train, plan)

            for test, train in followed:
                alone = compute(train)
                # The order matters: state that `restore` does not reach makes both differ.
                if compute(train, test) != alone and compute(train) == alone:
                    return test.split, plan.updates_before(train.index)
    finally:
        task.close()
    return None


class _RecordLosses(StepEvents):
    """Keeps digests of the losses of a step."""

    def __init__(self) -> None:
        self.digests: list[Mapping[str, str]] = []

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Keep the loss of a forward pass."""
        self.digests.append(digest_leaves(out.loss, "loss"))
        return out


def _train_batch(task: Task, phase: Phase, plan: Plan) -> Any:
    """Make an update with the first micro-batch of a phase; return digests of its losses and of the
    trained weights."""
    task.begin(phase, fresh=True)
    if not phase.first:
        task.begin_epoch(phase)
    # In the middle of the schedules: with the first values of a warm-up, no weight would move.
    at = plan.position_of(phase, 0)._replace(where=0.5, within=0.5)
    events = _RecordLosses()
    task.run_step([_read_batch(task, phase)], at, events)
    weights = []
    for updater in task.updaters.values():
        updater.resolve()
        weights += list(updater.gradients.parameters)
    return events.digests, digest_leaves(weights, "weights")


def _measure_batch(task: Task, phase: Phase, plan: Plan) -> None:
    """Measure the first micro-batch of a test that has begun."""
    with torch.no_grad():
        task.run_step([_read_batch(task, phase)], plan.position_of(phase, 0), StepEvents())


def _read_batch(task: Task, phase: Phase) -> Batch:
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    batch.weight = task.weight_of(batch)
    return batch.to(task.parts.machine.device)


def _copy_state(task: Task) -> SavedTask:
    world = task.parts.world
    shared = deepcopy(task.shared_state())
    if world.is_single_process:
        return SavedTask(shared)
    ranks: list[Mapping[str, Any]] = [{} for _ in range(world.size)]
    ranks[world.rank] = deepcopy(task.rank_state())
    return SavedTask(shared, ranks)
