"""Proves before the first step that a resume is exact.

Some steps, a save, and more steps; then all parts are built again from the config, the state is
restored, and the same steps are made. Every bit of the batches, outputs, losses, metrics and states
is compared.
"""

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from phasetrain.checkpoint.codec import assemble_state, flatten_state
from phasetrain.data import CustomLoader
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks.hidden_state import HeldState, open_held_state
from phasetrain.proof.causes import name_section
from phasetrain.proof.compare import Difference, find_difference
from phasetrain.proof.held import Held
from phasetrain.proof.trace import Trace
from phasetrain.runtime.format import join_first
from phasetrain.tasks import SavedTask, Task
from phasetrain.tasks.dry_run import warm_up
from phasetrain.tasks.parts import StepEvents

log = logging.getLogger(__name__)

STEPS = 2
"""Number of steps before the save, and after it."""

COMPUTED = ("LOSS", "MODEL", "TASK")
"""Sections whose values a custom task computes too."""

MAX_PATHS = 4
"""Number of names in a message."""


@dataclass(frozen=True)
class Segment:
    """Steps of a phase, with a save between them.

    Attributes:
        phase: the phase.
        before, after: numbers of steps before and after the save.
    """

    phase: Phase
    before: int
    after: int


@dataclass
class Record:
    """The result of a segment without a resume.

    Attributes:
        saved: the state at the save, copied to the CPU.
        trace: the later steps, and the end of the phase.
        held: values in the parts at the end, see `HeldState.read`.
    """

    saved: SavedTask
    trace: Trace
    held: Mapping[str, Held]


class _RecordStep(StepEvents):
    """Records batches, outputs and losses of a step in a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def on_batch(self, batch: Batch) -> Batch:
        """Record the inputs of the model."""
        self._trace.record_batch(batch)
        return batch

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Record the outputs of the model and the loss."""
        self._trace.record(f"loss.{self._trace.passes}", out.loss)
        self._trace.record_output(out.output)
        return out


class ResumeProof:
    """Compares a run with its resume, a few steps each.

    Args:
        plan: of the run.
        task: the task without a resume; closed and dropped by `prove`.
        inexact: splits whose samples need not be the same after a resume; they are left out.
        is_small: parts are not worth the time of a garbage collection.
    """

    def __init__(
        self, plan: Plan, task: Task, *, inexact: Collection[str] = (), is_small: bool = False
    ) -> None:
        self.is_small = is_small
        self._inexact = inexact
        self.plan = plan
        self.segments = [
            segment for segment in _list_segments(plan) if segment.phase.data not in inexact
        ]
        task.close()
        read_here(task)
        updater = task.parts.updater
        if updater is not None and updater.factor != 1.0:
            updater.factor = 1.0  # the rehearsal has slowed it down
        self._task: Task | None = task

    def prove(self, rebuild: Callable[[], Task]) -> dict[str, list[str]]:
        """Return a sentence for each part that would not resume exactly, with the record of a value
        (`HeldState.describe_lost`) or nothing; every rank has to call.

        Args:
            rebuild: builds all parts again from the config.
        """
        task = self._task
        assert task is not None, "a proof is made once"
        records = [_run_segment(task, self.plan, segment) for segment in self.segments]
        task.close()
        # Freed before the others are built, so that both never fill the memory at once.
        self._task = None
        del task
        if not self.is_small:
            gc.collect()
        again = rebuild()
        read_here(again)
        try:
            return self._compare(again, records)
        finally:
            again.close()

    def _compare(self, task: Task, records: list[Record]) -> dict[str, list[str]]:
        state = open_held_state(task, self._inexact)
        problems: dict[str, list[str]] = {}
        lost: dict[str, Held] = {}
        # Tests first: after a resume in a test, no train step has set anything that they use.
        for segment, record in zip(reversed(self.segments), reversed(records), strict=True):
            problem = _compare_segment(task, self.plan, segment, record, state, lost)
            # All ranks have to come to the same verdict, before any of them makes further steps
            # that others would not make; each has seen its own samples only.
            for line in filter(None, task.parts.world.all_gather(problem)):
                problems[line] = []
            if problems:
                break  # what comes later may only follow from it
        lines = {} if state is None else state.describe_lost(lost.values())
        for found in task.parts.world.all_gather(lines):
            problems |= found
        return problems


def read_here(task: Task) -> None:
    """Let the loaders of a task read in this process: workers would take longer to start than a few
    batches take to read, and batches do not depend on them."""
    for loader in task.parts.loaders.values():
        if not isinstance(loader, CustomLoader):
            loader.settings = replace(loader.settings, workers=0)


def count_steps(plan: Plan) -> int:
    """Return the number of steps of a proof."""
    return sum(segment.before + 2 * segment.after for segment in _list_segments(plan))


def _list_segments(plan: Plan) -> Iterator[Segment]:
    """Yield the first train phase, and the first test of each split without averaged weights."""
    seen = set[str]()
    # Train first: a resume in the middle of a test is compared with the weights of the training.
    phases = [phase for phase, _ in plan.phases.kinds]
    for phase in sorted(phases, key=lambda phase: not phase.is_train):
        if phase.split in seen or phase.weights or not phase.steps:
            continue
        seen.add(phase.split)
        before = min(STEPS, max(1, phase.steps - 1))
        yield Segment(phase, before, min(STEPS, phase.steps - before))


def _run_segment(task: Task, plan: Plan, segment: Segment) -> Record:
    phase = segment.phase
    if phase.is_train:
        warm_up(task, phase)
    task.begin(phase, fresh=True)
    _run_steps(task, plan, phase, range(segment.before), Trace())
    saved = _copy_state(task)
    trace = _trace_end(task, plan, segment)
    state = open_held_state(task)
    return Record(saved, trace, {} if state is None else state.read(is_whole=True))


def _trace_end(task: Task, plan: Plan, segment: Segment) -> Trace:
    """Return a trace of the steps after the save, and of the end of the phase."""
    trace = Trace()
    phase = segment.phase
    _run_steps(task, plan, phase, range(segment.before, segment.before + segment.after), trace)
    trace.record_state(task.stateful())
    trace.record("metrics", _measure(task, phase))
    trace.end_step((phase.index + 1, 0))
    return trace


def _measure(task: Task, phase: Phase) -> dict[str, float]:
    try:
        return task.measure(phase)
    except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
        # The rehearsal has warned: metrics of so few samples may be undefined.
        log.debug("the metrics of a few batches cannot be computed: %s", error)
        return {}


def _run_steps(task: Task, plan: Plan, phase: Phase, steps: range, trace: Trace) -> None:
    loaded = iter(task.batches(phase, steps.start))
    events = _RecordStep(trace)
    for step in steps:
        # Schedules are in the middle of the run: with the first values of a warm-up, which are
        # close to zero, an update would change no bit of a weight.
        at = plan.position_of(phase, step)._replace(where=0.5, within=0.5)
        task.run_step(next(loaded), at, events)
        if phase.is_train:
            task.updater.resolve()
            trace.record_state(task.stateful())
        trace.end_step((phase.index, step + 1))


def _copy_state(task: Task) -> SavedTask:
    world = task.parts.world
    shared = _copy_to_cpu(world.broadcast(task.shared_state()))
    if world.is_single_process:
        return SavedTask(shared)
    ranks: list[Mapping[str, Any]] = [{} for _ in range(world.size)]
    ranks[world.rank] = _copy_to_cpu(task.rank_state())
    return SavedTask(shared, ranks)


def _copy_to_cpu(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state as a checkpoint would give it back."""
    try:
        tree, tensors = flatten_state(dict(state))
    except TypeError as error:
        raise ConfigError(
            f"this run could not be saved: {error}", code="checkpoint.not_encodable"
        ) from error
    # Cloned: on the CPU, `cpu()` returns the tensor of the task, which the next step changes.
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors}
    copied: Mapping[str, Any] = assemble_state(tree, copies)
    return copied


def _compare_segment(
    task: Task,
    plan: Plan,
    segment: Segment,
    record: Record,
    state: HeldState | None,
    lost: dict[str, Held],
) -> str:
    """Return a sentence if the segment differs after a restore, else an empty string; add the
    values that differ to `lost`, by their paths."""
    phase = segment.phase
    if phase.is_train:
        warm_up(task, phase)
    else:
        # A new process has empty meters.
        for meter in task.meters.values():
            meter.reset()
    try:
        task.restore(record.saved)
    except ChangedError as error:
        return f"{_find_rejected(task, error)}: the run could not be resumed: {error}"
    task.begin(phase, fresh=False)
    difference = find_difference(record.trace, _trace_end(task, plan, segment))
    changed = {} if state is None else state.find_changed(record.held)
    if phase.is_train or difference:  # a test need not set again what only train steps use
        lost.update(changed)
    if difference:
        return _describe_difference(task, difference, list(changed.values()), phase)
    return ""


def _describe_difference(task: Task, difference: Difference, lost: list[Held], phase: Phase) -> str:
    path = difference.path
    key = name_section(path)
    cause = difference.cause
    if key == "DATA":
        key = f"DATA.{phase.data.upper()}"
    elif key in COMPUTED and lost and {held.part for held in lost} == {"task"}:
        key = "TASK"
        cause = (
            f"{type(task).__name__} changes what `stateful()` does not return: add it there, as an "
            "object with state_dict and load_state_dict "
            '(`return {**super().stateful(), "carried": self.carried}`), or draw from torch\'s '
            "global generator"
        )
    elif not lost and _may_kernels_differ(task):
        key = "MACHINE.deterministic = false"
        cause = (
            "CUDA kernels whose results differ from run to run; MACHINE.deterministic=true uses "
            "deterministic ones"
        )
    elif path.startswith("loss."):
        key = _find_loss_key(task, lost)
    elif path in _list_weights(task):
        key = "OPTIMIZER"  # it has moved the weights otherwise, since the losses were equal
    attributes = ""
    if lost:
        attributes = f", as well as {_join_attributes(lost)}"
    activity = "training" if phase.is_train else "a test"
    return (
        f"{key}: a run that is resumed in {activity} would not be exact: {path} differs"
        f"{attributes}. Usual cause: {cause}. RUN.exact=false trains nevertheless"
    )


def _may_kernels_differ(task: Task) -> bool:
    """Return whether two equal steps may differ by the kernels of the device alone."""
    device = task.parts.machine.device
    return device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()


def _find_loss_key(task: Task, lost: list[Held]) -> str:
    """Return the part to blame for a loss that differs, given the attributes that differ."""
    holders = {held.part for held in lost}
    if "loss" in holders or type(task).forward.__module__.startswith("phasetrain."):
        return "LOSS"
    if "task" in holders:
        return "TASK"
    return "TASK (or LOSS)"  # a custom `forward` may add to the loss


def _list_weights(task: Task) -> set[str]:
    """Return the paths of the parameters in a trace."""
    return {
        f"state.{name}.{weight}"
        for name, module in (("model", task.parts.model), ("loss", task.parts.loss))
        for weight, _ in module.named_parameters()
    }


def _find_rejected(task: Task, error: ChangedError) -> str:
    """Return the section of the part that an error of a restore names."""
    return name_section(next((name for name in task.stateful() if repr(name) in str(error)), ""))


def _join_attributes(lost: list[Held]) -> str:
    names = [f"`{held.name}` of {name_section(held.part)}" for held in lost]
    return join_first(list(dict.fromkeys(names)), MAX_PATHS)
