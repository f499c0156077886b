"""What a run says of itself before its first step and after its last."""

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch

from phasetrain.checkpoint import Checkpointer
from phasetrain.commands.setup import Setup
from phasetrain.commands.train.run_documents import command
from phasetrain.config.attrdict import AttrDict
from phasetrain.engine.plan import Phase, Plan
from phasetrain.engine.position import RunState
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.format import format_duration, join_first
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.terminal import Pairs
from phasetrain.tasks import SplitData

LENGTHS = ("epochs", "updates", "samples")
"""Keys of PHASES by one of which a training has its length."""

PARTS = 4
"""Parts of a time line that are shown; of a longer one the first of them."""


def opening(
    setup: Setup,
    folder: RunFolder,
    machine: Machine,
    data: Mapping[str, SplitData],
    plan: Plan,
    model: torch.nn.Module,
    *,
    estimate: float | None = None,
) -> Pairs:
    """Return what is said before the first step: run, device, data, model and plan.

    Args:
        setup: of the run.
        folder: the run folder, which is open.
        machine: where it computes, which may differ from what the setup says on a resume.
        data: split -> its data.
        plan: every phase.
        model: what is trained.
        estimate: seconds that the run will take, where that is known.
    """
    config = setup.config
    world = setup.world
    threads = machine.threads or torch.get_num_threads()
    if world.is_single_process:
        size = "1 process"
    else:
        size = f"{world.size} processes ({config.DISTRIBUTED.strategy})"
    place = [
        _device(machine),
        machine.precision,
        f"{threads} thread{'' if threads == 1 else 's'}",
        size,
    ]
    place += ["deterministic"] if machine.deterministic else []
    sizes = ", ".join(f"{name} {split.length:,}" for name, split in data.items())
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = f"{total:,} parameters" + (
        "" if trained == total else f", {trained:,} of them trained"
    )
    length = f"{plan.epochs:,} epochs, {plan.updates:,} updates: {timeline(plan)}"
    expected = "" if estimate is None else f"; about {format_duration(estimate)}"
    return [
        (
            "run",
            f"{config.RUN.name} in {folder.path}, attempt {folder.attempt}; the same command resumes it",
        ),
        ("device", f"{', '.join(place)}, seed {config.RUN.seed}"),
        (
            "data",
            f"{config.DATA.TRAIN.dataset} ({sizes} samples), {config.DATA.TRAIN.batch_size:,} per update",
        ),
        ("model", f"{config.MODEL.name}, {parameters}"),
        ("plan", f"{length}{expected}"),
    ]


def ended(
    setup: Setup, state: RunState, digest: str, best: str, checkpointer: Checkpointer
) -> Pairs:
    """Return what is said after the last step of a run that has finished.

    Args:
        setup: of the run.
        state: where it ended.
        digest: of the weights.
        best: path of the checkpoint whose weights they are, or empty.
        checkpointer: asked whether there is anything to load and to go on from.
    """
    folder = setup.config.RUN.dir
    chosen = ", checkpoint='best'" if best else ""
    kept = _keeps(checkpointer)
    rest = "everything is in" if kept else "no checkpoint was kept, everything else is in"
    return [
        ("end", f"{state.finished} after {state.updates} updates; {rest} {folder}"),
        *(_longer(setup.config) if kept else []),
        *([("load", f"phasetrain.load({folder!r}{chosen}) in Python")] if kept else []),
        ("weights", f"sha256 {digest}{f' (of {best}, the best)' if best else ''}"),
    ]


def stopped(setup: Setup, state: RunState, plan: Plan, reason: str) -> Pairs:
    """Return what is said of a run that was stopped and will go on."""
    at = f"update {state.updates} of {plan.updates}"
    return [("end", f"stopped by {reason} at {at}; go on with: {command(setup)}")]


def timeline(plan: Plan) -> str:
    """Return the phases of a plan in their order, equal ones in a row together:
    `12 x (train 22, test 2)`."""
    parts = []
    for unit, same in groupby(_units(plan)):
        count = len(list(same))
        inside = ", ".join(_told(unit))
        parts.append(f"{count} x ({inside})" if count > 1 else inside)
    return join_first(parts, PARTS, empty="nothing")


def _units(plan: Plan) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield pieces of the plan that end with tests, as (split, steps)."""
    unit: list[Phase] = []
    for phase in plan.phases:
        if unit and not unit[-1].is_train and phase.is_train:
            yield tuple((one.split, one.steps) for one in unit)
            unit = []
        unit.append(phase)
    if unit:
        yield tuple((one.split, one.steps) for one in unit)


def _told(unit: tuple[tuple[str, int], ...]) -> Iterator[str]:
    for (split, steps), same in groupby(unit):
        count = len(list(same))
        yield f"{split} {steps:,}" if count == 1 else f"{count} x {split} {steps:,}"


def _keeps(checkpointer: Checkpointer) -> bool:
    """Tell whether a run has a checkpoint; where nobody can tell, it is taken to have one."""
    try:
        return bool(checkpointer.list_checkpoints())
    except OSError:
        return True


def _longer(config: AttrDict) -> Pairs:
    """Return how to train on after the end."""
    key = next((key for key in LENGTHS if config.PHASES[key] is not None), None)
    if key is None or config.PHASES.stages:
        return []
    return [
        ("resume", f"to train on: PHASES.{key}={2 * config.PHASES[key]} RUN.allow=[PHASES.{key}]")
    ]


def _device(machine: Machine) -> str:
    if machine.device.type != "cuda":
        return str(machine.device)
    return f"{machine.device} ({torch.cuda.get_device_name(machine.device)})"
