"""Computes random updates twice and compares all bits (hook `recheck`)."""

import copy
import logging
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from phasetrain.addons.observe.recheck.findings import (
    ChangedValue,
    describe_findings,
    sort_findings,
)
from phasetrain.addons.observe.recheck.moments import Moments
from phasetrain.addons.observe.recheck.state_copy import StateCopy
from phasetrain.addons.observe.recheck.step_trace import (
    StepTrace,
    clone_batches,
    compare_batches,
    read_again,
)
from phasetrain.checkpoint.rechecked import Rechecked, read_rechecked, write_rechecked
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.engine.position import Position
from phasetrain.errors import ConfigError, CorruptionError
from phasetrain.hooks.base import HOOKS, Hook, Run, overrides
from phasetrain.optim import NonFinite
from phasetrain.runtime.machine import preserve_generators
from phasetrain.tasks import StepEvents, Task
from phasetrain.tasks.generator_use import GeneratorUse

log = logging.getLogger(__name__)

DATA = ("samples", "batch content")
"""Components that are compared with another reading, not with another computation."""

STEP_EVENTS = (
    *("on_step_start", "on_batch", "on_output", "on_forward"),
    *("on_backward", "on_skip", "on_update"),
)
"""Events in which a hook could change the result of an update."""


@dataclass
class CheckedStep:
    """An update that is computed twice.

    Attributes:
        at: its position.
        step: number of the step in its phase, from 0.
        generators: use of the random generators before it.
        batches: copies of its micro-batches, before the first computation.
        trace: losses and gradients of the first computation.
        is_begun: whether the engine has begun to compute it; a custom loop may do so itself.
        skipped: whether the update was not made, because it was not finite or has no samples.
        seconds: time that the recheck has taken.
    """

    at: Position
    step: int
    generators: GeneratorUse
    batches: list[Batch] = field(default_factory=list)
    trace: StepTrace = field(default_factory=StepTrace)
    is_begun: bool = False
    skipped: bool = False
    seconds: float = 0.0


@HOOKS.register("recheck")
class Recheck(Hook):
    """Computes a random update twice every few minutes, and ends the run if a bit differs.

    Before the update, the state of the task is copied to host memory. After it, that state is
    restored, the samples are read again, and the update is computed again without hooks. If all
    bits are equal, the run continues with the same state as without the recheck. Otherwise the run
    ends with exit code 8, and checkpoints that were written since the last good recheck are not
    used any more.

    Args:
        every_minutes: interval in which one random moment is chosen; `auto` chooses it so that
            rechecks take 1 % of the time.

    Attributes:
        count: number of updates that were equal, in this attempt.
        seconds: time that rechecks have taken, in this attempt.
    """

    main_only = False
    observe_only = True
    single = True

    def __init__(
        self,
        every_minutes: float | Literal["auto"] = "auto",
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        if every_minutes != "auto" and not (
            isinstance(every_minutes, int | float) and every_minutes > 0
        ):
            raise ValueError(f"every_minutes = {every_minutes!r}: expected auto, or more than 0")
        self.count = 0
        self.seconds = 0.0
        self._is_exact = (hparams or {}).get("RUN.exact") is not False
        self._moments = Moments(every_minutes)
        self._is_armed = False
        self._step: CheckedStep | None = None
        self._before = StateCopy()
        self._after = StateCopy()
        self._record = Rechecked()
        self._is_written = True
        self._hooks_checked = 0
        self._first_update = 0
        self._began = 0.0

    def on_start(self, run: Run) -> None:
        """Check that updates can be repeated, and read the record of earlier attempts."""
        check_run(run, is_exact=self._is_exact)
        check_hooks(run, self)
        self._hooks_checked = len(run.hooks.by_label)
        self._first_update = run.state.updates
        if run.folder is not None and run.world.is_main:
            root = run.folder.file("checkpoints")
            stored = read_rechecked(run.folder.storage, root)
            # The first attempt trusts what it starts from. An attempt that starts before the last
            # good update repeats it, and what it saves until then is new.
            self._record = stored or Rechecked(good=run.state.updates)
            good = min(self._record.good, run.state.updates)
            self._is_written = stored is not None and good == stored.good
            self._record = replace(self._record, good=good)
        self._began = time.monotonic()
        self._moments.start()

    def on_step_start(self, run: Run, phase: Phase) -> None:
        """Copy the state before the update to check."""
        if not self._is_armed or not phase.is_train:
            return
        self._is_armed = False
        began = time.perf_counter()
        if len(run.hooks.by_label) != self._hooks_checked:  # hooks may be added in any step
            check_hooks(run, self)
            self._hooks_checked = len(run.hooks.by_label)
        task = run.task
        self._before.copy(task)
        position = run.plan.position(run.state)
        self._step = CheckedStep(position, run.state.step, copy.copy(task.generators))
        # Only for this update; a custom loop that computes it without the engine does not call it.
        task.run_step = partial(self._begin_step, task, task.run_step)  # type: ignore[method-assign]
        self._step.seconds = time.perf_counter() - began

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Keep the loss of a micro-batch of the update to check."""
        if self._step is not None and phase.is_train:
            self._step.trace.on_forward(out)

    def on_skip(self, run: Run, phase: Phase, batches: list[Batch], found: NonFinite) -> None:
        """Remember that the update to check was not made."""
        if self._step is not None and found.updates == self._step.at.updates + 1:
            self._step.skipped = True

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Compute the update again if it is to be checked, and choose the next one."""
        if self._step is not None and phase.is_train:
            del vars(run.task)["run_step"]
            self._recheck(run, phase, self._step)
        # Rank 0 alone has a clock: all ranks agree with it, and check the same update.
        if run.world.is_main and self._moments.take():
            run.consensus.ask("recheck")
        if run.consensus.take("recheck"):
            self._is_armed = True

    def on_save(self, run: Run) -> None:
        """Write which updates are checked, since a checkpoint is about to be written."""
        if run.world.is_main and run.folder is not None and not self._is_written:
            try:
                self._write(run)
            except OSError as error:  # an older record trusts less, never more
                log.warning("HOOKS.recheck: the record could not be written: %s", error)

    def on_end(self, run: Run) -> None:
        """Log how many updates were checked."""
        updates = run.state.updates - self._first_update
        if not run.world.is_main or not updates:
            return
        share = self.seconds / max(time.monotonic() - self._began, 1e-9)
        log.info(
            "recheck: %d of %d updates were computed twice, all bits equal (%.1f %% of the time)",
            self.count,
            updates,
            100 * share,
        )
        if run.folder is not None:
            run.folder.note(rechecked={"updates": self.count, "last": self._record.good})

    def _begin_step(
        self,
        task: Task,
        run_step: Callable[..., StepOutput],
        batches: list[Batch],
        at: Position,
        events: StepEvents,
    ) -> StepOutput:
        """Copy the micro-batches right before they are used, and watch the gradients."""
        step = self._step
        assert step is not None, "an update is being checked"
        began = time.perf_counter()
        step.is_begun = True
        step.skipped = not batches
        step.batches = clone_batches(batches)
        step.trace.begin(task)
        step.seconds += time.perf_counter() - began
        return run_step(batches, at, events)

    def _recheck(self, run: Run, phase: Phase, step: CheckedStep) -> None:
        self._step = None
        began = time.perf_counter()
        task = run.task
        step.trace.end(task)
        if not step.is_begun:
            raise ConfigError(
                "HOOKS.recheck: the custom loop computes its updates itself, so they cannot be "
                "repeated; compute them with engine.compute(batches), or remove the hook",
                code="recheck.custom_loop",
            )
        # With a lag, this also brings the verdict on the update.
        self._after.copy(task)
        if not step.skipped:
            again = read_again(task.parts.loaders[phase.data], phase, step.step)
            differences = [] if again is None else compare_batches(step.batches, again)
            trace = self._repeat(run, step)
            differences += step.trace.compare(trace) + self._after.compare(task)
            every = run.world.all_gather(sort_findings(differences))
            # On all ranks: one that went on alone would wait for the others forever.
            if any(every):
                raise self._report(run, step, every)
            self.count += 1
            if run.world.is_main:
                self._record = replace(self._record, good=run.state.updates)
                self._is_written = False
        seconds = step.seconds + time.perf_counter() - began
        self.seconds += seconds
        self._moments.choose_next(seconds)

    def _repeat(self, run: Run, step: CheckedStep) -> StepTrace:
        """Compute an update again from the state before it."""
        task = run.task
        trace = StepTrace()
        generators = task.generators
        # It counts the steps of a phase, and must not count this one twice.
        task.generators = copy.copy(step.generators)
        try:
            with preserve_generators():
                self._before.restore(task)
                trace.begin(task)
                task.run_step(clone_batches(step.batches), step.at, trace)
                trace.end(task)
                for updater in task.updaters.values():
                    updater.resolve()
        finally:
            task.generators = generators
        return trace

    def _report(self, run: Run, step: CheckedStep, every: list[list[ChangedValue]]) -> Exception:
        """Record a mismatch, and return the error that ends the run; all ranks call it."""
        world = run.world
        number = step.at.updates + 1
        devices = world.all_gather(_describe_device(run.task.parts.machine.device))
        own = sort_findings([difference for differences in every for difference in differences])
        first = own[0].component
        # Gradients are exchanged after they were computed: later components differ on all ranks.
        ranks = [
            rank
            for rank, differences in enumerate(every)
            if any(difference.component == first for difference in differences)
        ]
        verdict = ""
        if first not in DATA:
            verdict = self._judge(run, step)
        places = [f"rank {rank} on {devices[rank]}" for rank in ranks]
        facts = {
            "update": number,
            "good": self._record.good,
            "components": list(dict.fromkeys(difference.component for difference in own)),
            "ranks": ranks,
            "devices": [devices[rank] for rank in ranks],
            "verdict": verdict,
        }
        good = world.run_on_main(lambda: self._write_mismatch(run, facts))
        description = describe_findings(sort_findings(every[ranks[0]]))
        return CorruptionError(
            f"HOOKS.recheck: update {number} had another result when it was repeated, on "
            f"{' and '.join(places)}: {description}. {verdict}Checkpoints after update {good}, "
            "the last one that was rechecked, are not used any more: test or replace the machine, "
            "then run the same command again, which resumes from the checkpoint before it"
        )

    def _judge(self, run: Run, step: CheckedStep) -> str:
        """Return which computation was wrong, decided by a third one; all ranks call it."""
        # The task has the result of the second computation now; the third is compared with both.
        second = StateCopy()
        second.copy(run.task)
        self._repeat(run, step)
        like_run = not any(run.world.all_gather(self._after.compare(run.task)))
        like_second = not any(run.world.all_gather(second.compare(run.task)))
        if like_run:
            return "A third computation agrees with the run: the repetition was disturbed. "
        if like_second:
            return "A third computation agrees with the second: the update was disturbed. "
        return (
            "A third computation agrees with neither: the device fails often, or a part of the "
            "run is not deterministic. "
        )

    def _write_mismatch(self, run: Run, facts: Mapping[str, Any]) -> int:
        """Record a mismatch next to the checkpoints, and return the last good update."""
        record = self._record
        self._record = replace(record, is_open=True, mismatches=(*record.mismatches, facts))
        if run.folder is not None:
            # The error matters more than its record.
            with suppress(OSError):
                self._write(run)
        return record.good

    def _write(self, run: Run) -> None:
        assert run.folder is not None, "only runs with a folder have a record"
        write_rechecked(run.folder.storage, run.folder.file("checkpoints"), self._record)
        self._is_written = True


def _describe_device(device: torch.device) -> str:
    """Return a device with its name and host."""
    name = str(device)
    if device.type == "cuda":
        name += f" ({torch.cuda.get_device_name(device)})"
    return f"{name} of {platform.node()}"


def check_run(run: Run, *, is_exact: bool) -> None:
    """Check that the parts of a run allow an update to be repeated.

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
