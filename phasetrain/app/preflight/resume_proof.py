"""Proves before the first step that a resume is exact.

Some steps, a save, and more steps; then all parts are built again from the config, the state is
restored, and the same steps are made. Every bit of the batches, outputs, losses, metrics and states
is compared.
"""

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from phasetrain.app.preflight.attributes import digest_attributes
from phasetrain.checkpoint.codec import assemble_state, flatten_state
from phasetrain.data import CustomLoader
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runtime.compare import digest_leaves
from phasetrain.runtime.format import join_first
from phasetrain.tasks import Position, SavedTask, Task
from phasetrain.tasks.dry_run import warm_up
from phasetrain.tasks.parts import StepEvents

log = logging.getLogger(__name__)

STEPS = 2
"""Number of steps before the save, and after it."""

MAX_PATHS = 4
"""Number of names in a message."""

NOT_EXACT = "resume.not_exact"
"""Code of the error that a part would not resume exactly."""

Moment = dict[str, str]
"""Digests by path, first those of the causes: batches, outputs, losses, states, metrics."""

CAUSES = {
    "batch": (
        "the dataset, a transform, the sampler or the collate function uses a random generator "
        "that the run does not seed, counts its calls, or caches what it has drawn; let it draw "
        "from the global generators, which are seeded before each sample and each batch"
    ),
    "output": (
        "the model holds something that is not in its state_dict (a Python number, a list, a "
        "buffer with persistent=False) or a random generator of its own; register a buffer, "
        "implement get_extra_state and set_extra_state, or draw from torch's global generator, "
        "which is seeded in every step"
    ),
    "loss": (
        "the loss or a custom task holds something that is not in its state_dict, or a random "
        "generator of its own; register a buffer, implement get_extra_state and set_extra_state, "
        "or draw from torch's global generator, which is seeded in every step"
    ),
    "state": (
        "it holds something that is not in its state_dict, or its load_state_dict does not load "
        "all of it; keep it in the state (an optimizer: in `self.state[parameter]`)"
    ),
    "metrics": (
        "the meter holds something that is not in its state_dict; declare it with `add_sum`, or "
        "register a buffer"
    ),
}
"""Usual causes and corrections, by the first component of the path that differs."""


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
        moments: digests of each later step, then of the end of the phase.
        attributes: digests of plain attributes at the end.
    """

    saved: SavedTask
    moments: list[Moment] = field(default_factory=list)
    attributes: Moment = field(default_factory=dict)


class _Recorder(StepEvents):
    """Records digests of batches, outputs and losses of one step."""

    def __init__(self) -> None:
        self.found: Moment = {}
        self._passes = 0

    def on_batch(self, batch: Batch) -> Batch:
        """Record the inputs of the model."""
        content = {
            "ids": batch.ids,
            "input": batch.input,
            "target": batch.target,
            "mask": batch.mask,
        }
        # Digests, since the step may change the tensors in place.
        self.found |= digest_leaves(content, f"batch.{len(self.found)}")
        return batch

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Record the outputs of the model and the loss."""
        self._passes += 1
        self.found |= digest_leaves(_detach(out.output), f"output.{self._passes}")
        self.found |= digest_leaves(out.loss.detach(), f"loss.{self._passes}")
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
        self.plan = plan
        self.segments = [one for one in _list_segments(plan) if one.phase.data not in inexact]
        task.close()
        read_here(task)
        updater = task.parts.updater
        if updater is not None and updater.factor != 1.0:
            updater.factor = 1.0  # the rehearsal has slowed it down
        self._task: Task | None = task

    def prove(self, rebuild: Callable[[], Task]) -> list[str]:
        """Return a sentence for each part that would not resume exactly; every rank has to call.

        Also warns of attributes that a resume would lose, if that has changed nothing.

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
            found = self._compare(again, records)
        finally:
            again.close()
        # All ranks have to come to the same verdict, and each has seen its own samples only.
        verdicts = again.parts.world.all_gather(found)
        return list(dict.fromkeys(line for one in verdicts for line in one))

    def _compare(self, task: Task, records: list[Record]) -> list[str]:
        lost: dict[str, None] = {}
        for segment, record in zip(self.segments, records, strict=True):
            verdict = _compare_segment(task, self.plan, segment, record, lost)
            if verdict:
                return [verdict]  # what comes later may only follow from it
        if lost:
            log.warning(
                "a resumed run would have another value of %s, which is in no state_dict; in the "
                "first steps that has changed nothing",
                _join_attributes(list(lost)),
            )
        return []


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
    for phase in sorted(phases, key=lambda one: not one.is_train):
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
    for _ in _run_steps(task, plan, phase, 0, segment.before):
        pass
    record = Record(_copy_state(task))
    record.moments += _continue_segment(task, plan, segment)
    record.attributes = digest_attributes(task)
    return record


def _continue_segment(task: Task, plan: Plan, segment: Segment) -> Iterator[Moment]:
    """Yield digests of the steps after the save, and of the end of the phase."""
    yield from _run_steps(task, plan, segment.phase, segment.before, segment.after)
    end = _digest_state(task)
    for label, value in _measure(task, segment.phase).items():
        end |= digest_leaves(value, f"metrics.{label}")
    yield end


def _digest_state(task: Task) -> Moment:
    states = {name: part.state_dict() for name, part in task.stateful().items()}
    return digest_leaves(states, "state")


def _measure(task: Task, phase: Phase) -> dict[str, float]:
    try:
        return task.measure(phase)
    except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
        # The rehearsal has warned: metrics of so few samples may be undefined.
        log.debug("the metrics of a few batches cannot be computed: %s", error)
        return {}


def _run_steps(task: Task, plan: Plan, phase: Phase, first: int, count: int) -> Iterator[Moment]:
    steps = iter(task.batches(phase, first))
    for step in range(first, first + count):
        recorder = _Recorder()
        at = _position_of(plan, phase, step)
        compute = task.train_step if phase.is_train else task.test_step
        if batches := next(steps):
            compute(batches, at, recorder)
        else:
            task.skip_step(at, recorder)
        if phase.is_train:
            task.updater.resolve()
            recorder.found |= _digest_state(task)
        yield recorder.found


def _position_of(plan: Plan, phase: Phase, step: int) -> Position:
    updates = plan.updates_before(phase.index)
    if phase.is_train:
        updates += step
    at = plan.position(RunState(phase=phase.index, step=step, updates=updates))
    # Schedules are in the middle of the run: with the first values of a warm-up, which are close
    # to zero, an update would change no bit of a weight.
    return at._replace(where=0.5, within=0.5)


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
    found: Mapping[str, Any] = assemble_state(tree, copies)
    return found


def _compare_segment(
    task: Task, plan: Plan, segment: Segment, record: Record, lost: dict[str, None]
) -> str:
    """Return a sentence if the segment differs after a restore, else an empty string; add the paths
    of attributes that differ to `lost`."""
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
        return f"{_name_part(_find_part(task, error))}: the run could not be resumed: {error}"
    task.begin(phase, fresh=False)
    changed: list[str] = []
    again = _continue_segment(task, plan, segment)
    for expected, moment in zip(record.moments, again, strict=True):
        paths = {**expected, **moment}
        changed = [path for path in paths if expected.get(path) != moment.get(path)]
        if changed:
            break
    now = digest_attributes(task)
    here = [path for path in now if now[path] != record.attributes.get(path, now[path])]
    if changed:
        return _describe_difference(task, changed, here, phase)
    lost |= dict.fromkeys(here)
    return ""


def _describe_difference(task: Task, changed: list[str], lost: list[str], phase: Phase) -> str:
    path = changed[0]
    kind, _, name = path.partition(".")
    key = {"batch": f"DATA.{phase.data.upper()}", "output": "MODEL"}.get(kind)
    if kind == "metrics":
        key = f"METERS.{name.partition('.')[0].partition('/')[0]}"
    elif kind == "state":
        key = _name_part(_find_changed_part(task, name))
    elif kind == "loss":
        key = _find_loss_key(task, lost)
    attributes = ""
    if lost:
        attributes = f", as well as {_join_attributes(lost)}"
    place = "a test" if not phase.is_train else "training"
    return (
        f"{key}: a run that is resumed in {place} would not be exact: {path} differs{attributes}. "
        f"Usual cause: {CAUSES[kind]}. RUN.exact=false trains nevertheless"
    )


def _find_loss_key(task: Task, lost: list[str]) -> str:
    """Return the part to blame for a loss that differs, given the attributes that differ."""
    holders = {path.partition(":")[0] for path in lost}
    if "loss" in holders or type(task).forward.__module__.startswith("phasetrain."):
        return "LOSS"
    if "task" in holders:
        return "TASK"
    return "TASK (or LOSS)"  # a custom `forward` may add to the loss


def _find_changed_part(task: Task, path: str) -> str:
    """Return the name of the part to blame for the first path of a state that differs."""
    weights = {
        f"{name}.{weight}"
        for name, module in (("model", task.parts.model), ("loss", task.parts.loss))
        for weight, _ in module.named_parameters()
    }
    if path in weights:
        return "updater"  # it has moved the weights otherwise, since the losses were equal
    return max((name for name in task.stateful() if path.startswith(f"{name}.")), key=len)


def _find_part(task: Task, error: ChangedError) -> str:
    """Return the name of the part that an error of a restore names."""
    return next((name for name in task.stateful() if repr(name) in str(error)), "")


def _name_part(name: str) -> str:
    """Return the config key of a part, given the beginning of its path in a checkpoint."""
    kind, _, label = name.partition(".")
    if kind == "meter":
        return f"METERS.{label}"
    if kind == "data":
        return f"DATA.{label.upper()}"
    return {"model": "MODEL", "loss": "LOSS", "updater": "OPTIMIZER"}.get(kind, "TASK")


def _join_attributes(paths: list[str]) -> str:
    names = []
    for path in paths:
        part, _, place = path.partition(":")
        names.append(f"`{place.replace(':', '.')}` of {_name_attribute_holder(part)}")
    return join_first(list(dict.fromkeys(names)), MAX_PATHS)


def _name_attribute_holder(part: str) -> str:
    if part.startswith("optimizer."):
        return "OPTIMIZER"
    return _name_part(part)


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detach(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_detach(item) for item in value]
    return value
