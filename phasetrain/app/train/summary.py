"""The lines that a run prints before its first step and after its last."""

import os
from itertools import groupby
from typing import Any

import numpy as np
import torch

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.app.setup import Setup
from phasetrain.app.train.run_documents import format_resume
from phasetrain.checkpoint import Checkpointer
from phasetrain.config.compose.merge import lookup
from phasetrain.config.objects import display_name, is_object_name
from phasetrain.config.schema import DEFAULTS
from phasetrain.config.stages import LENGTHS
from phasetrain.data.datasets.forward import ENDLESS
from phasetrain.engine.phases import TRAIN, PhaseTable, number_rows
from phasetrain.engine.plan import Plan
from phasetrain.engine.position import COMPLETED, RunState
from phasetrain.runtime.format import format_count, join_first
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.terminal import IN_SWEEP, Pairs
from phasetrain.tasks import TASKS, SplitData, Task
from phasetrain.tasks.build.data_builder import count_left_out

ASSUMABLE = ("DATA.TRAIN.dataset", "MODEL.name", "LOSS.name", "OPTIMIZER.name", "OPTIMIZER.lr")
"""Keys that decide what a run is about: their defaults are printed."""

PARTS = 4
"""Maximum number of parts of a timeline to print."""


LOW_LR = 0.1
"""Fraction of its peak below which a learning rate is reported before a longer training."""


def first_lines(run_spec: RunSpec, model: torch.nn.Module, *, estimate: str = "") -> Pairs:
    """Return the lines before the first step: run, device, data, model and plan.

    Args:
        run_spec: the run, whose folder is open.
        model: the model to train.
        estimate: expected duration of the run as text, if known.
    """
    config = run_spec.setup.config
    world = run_spec.setup.world
    machine = run_spec.machine
    plan = run_spec.plan
    folder = run_spec.folder
    threads = machine.threads or torch.get_num_threads()
    size = format_count(world.size, "process")
    if not world.is_single_process:
        size += f" ({config.DISTRIBUTED.strategy})"
    thread_count = format_count(threads, "thread")
    device = [_name_device(machine), machine.precision, thread_count, size]
    if machine.deterministic:
        device.append("deterministic")
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = f"{total:,} parameters"
    if trained != total:
        parameters += f", {trained:,} of them trained"
    has_windows = any(split.windows for split in run_spec.data.values())
    passes = format_count(plan.epochs, "window" if has_windows else "epoch")
    length = f"{passes}, {format_count(plan.updates, 'update')}"
    length += f": {format_timeline(plan)}"
    if estimate:
        length += f"; about {estimate}"
    run = f"{config.RUN.name} in {folder.path}, attempt {folder.attempt}"
    return [
        ("run", f"{run}; the same command resumes it"),
        ("device", f"{', '.join(device)}, seed {config.RUN.seed}"),
        ("data", _describe_data(run_spec)),
        ("model", f"{display_name(config.MODEL.name)}, {parameters}"),
        *_list_assumed(run_spec.setup),
        ("plan", length),
    ]


def final_lines(
    setup: Setup,
    state: RunState,
    digest: str,
    best: str,
    checkpointer: Checkpointer,
    *,
    remaining_lr: float = 1.0,
) -> Pairs:
    """Return the lines after the last step of a run that has finished.

    Args:
        setup: of the run.
        state: position at the end.
        digest: of the weights.
        best: path of the checkpoint from which the weights were loaded, or empty.
        checkpointer: knows whether there is a checkpoint to load and to resume from.
        remaining_lr: learning rate with which a longer run would continue, as a fraction of its
            peak.
    """
    folder = setup.config.RUN.dir
    end = f"{state.finished} after {format_count(state.updates, 'update')}"
    weights = f"sha256 {digest}"
    chosen = ""
    if best:
        weights += f" (of {best}, the best)"
        chosen = ", checkpoint='best'"
    if is_object_name(setup.config.MODEL.name):
        chosen += ", model=model"
    if not has_checkpoint(checkpointer):
        end += f"; no checkpoint was kept, everything else is in {folder}"
        return [("end", end), ("weights", weights)]
    if IN_SWEEP in os.environ:  # the advice would be printed for each run
        return [("end", f"{end}; everything is in {folder}"), ("weights", weights)]
    return [
        ("end", f"{end}; everything is in {folder}"),
        *_explain_longer(setup, state, remaining_lr),
        ("load", f"phasetrain.load({folder!r}{chosen}) in Python"),
        ("weights", weights),
    ]


def stopped_lines(setup: Setup, state: RunState, plan: Plan, reason: str) -> Pairs:
    """Return the lines of a run that was stopped and can be resumed."""
    at = f"update {state.updates} of {plan.updates}"
    verb = "stopped"
    if reason.startswith("RUN.pause_at"):
        verb = "paused"
    return [("end", f"{verb} by {reason} at {at}; resume with: {format_resume(setup)}")]


def format_timeline(plan: Plan) -> str:
    """Return the phases of a plan in order, with repetitions grouped:
    `12 x (train 22, test 2)`."""
    units = _group_units(plan.phases)
    # The units that are not shown are only counted, so they need no text.
    shown = [_format_unit(plan.phases[begin:end], count) for begin, end, count in units[:PARTS]]
    return join_first([*shown, *units[PARTS:]], PARTS, empty="nothing")


def _group_units(phases: PhaseTable) -> list[tuple[int, int, int]]:
    """Return begin, end and number of repetitions of each unit: training phases up to and including
    the tests behind them, with the same splits and steps."""
    if not phases:
        return []
    is_train = phases.is_train
    # A train phase after a test begins the next unit.
    begins = np.flatnonzero(np.concatenate([[True], is_train[1:] & ~is_train[:-1]]))
    lengths = np.diff(begins, append=len(phases))
    # Each phase is compared with the one that is a unit's length before it.
    before = np.maximum(np.arange(len(phases)) - np.repeat(lengths, lengths), 0)
    codes = number_rows(phases.column("split"), phases.column("steps"))
    is_repeated = np.logical_and.reduceat(codes == codes[before], begins)
    is_repeated[1:] &= lengths[1:] == lengths[:-1]
    is_repeated[0] = False
    firsts = np.flatnonzero(~is_repeated)
    counts = np.diff(firsts, append=len(begins))
    ends = begins[firsts] + lengths[firsts]
    return list(zip(begins[firsts].tolist(), ends.tolist(), counts.tolist(), strict=True))


def _format_unit(phases: PhaseTable, repeats: int) -> str:
    parts = []
    for (split, steps), same in groupby((phase.split, phase.steps) for phase in phases):
        count = len(list(same))
        parts.append(f"{count} x {split} {steps:,}" if count > 1 else f"{split} {steps:,}")
    inside = ", ".join(parts)
    return f"{repeats} x ({inside})" if repeats > 1 else inside


def _describe_data(run_spec: RunSpec) -> str:
    """Return the dataset and number of samples of each split; a dataset that all splits share is
    named once."""
    splits = run_spec.data
    names = {display_name(split.section.dataset) for split in splits.values()}
    if len(names) == 1:
        sizes = ", ".join(f"{name} {_format_length(split)}" for name, split in splits.items())
        text = f"{names.pop()} ({sizes}{_unit(list(splits.values())[-1])})"
    else:
        text = ", ".join(
            f"{name} {display_name(split.section.dataset)} ({_format_length(split)}{_unit(split)})"
            for name, split in splits.items()
        )
    if list(splits) == [TRAIN]:
        text += ", no test split (DATA.TEST is not set)"
    if TRAIN not in splits:
        return text
    batch_size = run_spec.setup.config.DATA.TRAIN.batch_size
    text += f", {batch_size:,} per update"
    context = splits[TRAIN].facts.get("context")
    if isinstance(context, int):
        text += f" ({batch_size * context:,} tokens)"
    train = splits[TRAIN]
    if _count_samples(train) != train.length < ENDLESS:
        text += f", {train.length:,} per epoch"
    left_out = count_left_out(train, run_spec.setup.config.PHASES)
    if left_out:
        # short, so that the header of the default run has one line for it on 80 columns
        most = "at most " if splits[TRAIN].stages else ""
        text += f", {most}{left_out:,} left out/epoch"
    return text


def _unit(split: SplitData) -> str:
    return "" if split.length >= ENDLESS else " samples"


def _format_length(split: SplitData) -> str:
    if split.length >= ENDLESS:
        return "endless"
    return f"{_count_samples(split):,}"


def _count_samples(split: SplitData) -> int:
    """Return the samples that a mixture has, which an epoch draws in part or several times; of
    other datasets, the samples of an epoch."""
    is_mixture = hasattr(split.order, "count_undrawn")
    return len(split.reader.dataset) if is_mixture else split.length


def _list_assumed(setup: Setup) -> Pairs:
    """Return the parts that the run takes from the defaults although its config changes other
    parts."""
    composed = setup.composed
    task = TASKS.find(setup.config.TASK.name)
    assumed = [
        f"{key} = {lookup(composed.config, key)}"
        for key in ASSUMABLE
        if composed.origins.get(key, DEFAULTS) in composed.assumed
        and (key != "LOSS.name" or getattr(task, "uses_loss", True))
    ]
    # Of the default experiment itself, the lines above say enough.
    if not 0 < len(assumed) < len(ASSUMABLE):
        return []
    source = "defaults"
    if composed.experiment and composed.assumed != {DEFAULTS}:
        source = f"experiment={composed.experiment}, since none is given"
    return [("default", f"{', '.join(assumed)} ({source})")]


def has_checkpoint(checkpointer: Checkpointer) -> bool:
    """Return whether a run has a checkpoint; if the storage cannot be read, assume that it has."""
    try:
        return bool(checkpointer.list_checkpoints())
    except OSError:
        return True


def read_remaining_lr(task: Task, where: float) -> float:
    """Return the highest learning rate from a point of the training on, as a fraction of its peak;
    1 for a task without an updater."""
    updater = task.parts.updater
    return 1.0 if updater is None else updater.schedules.remaining_lr(where)


def _explain_longer(setup: Setup, state: RunState, remaining_lr: float) -> Pairs:
    """Return the command that trains longer; nothing if the run would stop again at once."""
    phases = setup.config.PHASES
    key = next((key for key in LENGTHS if phases[key]), None)
    if key is None or phases.stages or state.finished != COMPLETED:
        return []
    changes: dict[str, Any] = {f"PHASES.{key}": 2 * phases[key]}
    if remaining_lr < LOW_LR:
        changes["PHASES.extend"] = "stretch"
    if setup.given.by_name:
        changes["RUN.allow"] = ["PHASES"]
        return [("resume", f"the same call: fit(..., **{changes}) or run([..., {changes}])")]
    words = " ".join(f"{path}={value}" for path, value in changes.items())
    return [("resume", f"{format_resume(setup)} {words} RUN.allow=PHASES")]


def _name_device(machine: Machine) -> str:
    if machine.device.type != "cuda":
        return str(machine.device)
    return f"{machine.device} ({torch.cuda.get_device_name(machine.device)})"
