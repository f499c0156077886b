"""Whether a run may go on from a checkpoint: what was promised then against what is asked for
now."""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

from phasetrain import __version__
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.commands.setup import Setup
from phasetrain.config.changes import Change, differences
from phasetrain.config.problems import shown
from phasetrain.data import GrowingDataset
from phasetrain.data.samplers.phase_sampler import check_batches
from phasetrain.engine.interleave import splice
from phasetrain.engine.plan import Plan, Stage
from phasetrain.engine.position import RunState
from phasetrain.errors import ChangedError
from phasetrain.hooks import Hook
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import SplitData
from phasetrain.tasks.build.sections import DISTRIBUTED_KEYS

PACKAGES = (
    "torch",
    "numpy",
    "hydra-core",
    "omegaconf",
    "fvcore",
    "iopath",
    "fairscale",
    "safetensors",
    "rich",
)
"""Packages whose versions are noted."""

SHARES = ("processes", "strategy")
"""What the environment says of how processes share the work."""

PLANNED = ("PHASES.", "DATA.TRAIN.batch_size")
"""Keys whose change cuts the rest of the plan anew."""


def promise(
    setup: Setup,
    data: Mapping[str, SplitData],
    plan: Plan,
    machine: Machine,
    departures: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return what a checkpoint keeps for later attempts to compare with, as plain JSON data."""
    return {
        "config": setup.asked,
        "plan": plan.to_json(),
        "data": {name: split.fingerprint() for name, split in data.items()},
        "environment": environment(setup, machine),
        "packages": packages(),
        "code": code(setup),
        "departures": list(departures),
    }


def packages() -> dict[str, str | None]:
    """Return the version of each package that takes part; None where it is not installed."""
    found: dict[str, str | None] = {"phasetrain": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def code(setup: Setup) -> dict[str, str]:
    """Return the SHA-256 of the source of each module that RUN.imports names, or that is gone, an
    empty text."""
    found = {}
    for name in setup.config.RUN.imports:
        file = sys.modules[name].__file__ if name in sys.modules else None
        found[name] = (
            sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""
        )
    return found


def environment(setup: Setup, machine: Machine) -> dict[str, Any]:
    """Return what bits depend on beside config and data: versions, the machine, and how processes
    share the work."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": machine.device.type,
        "threads": machine.threads or torch.get_num_threads(),
        "processes": setup.world.size,
        "strategy": _strategy(setup),
    }


def _strategy(setup: Setup) -> str:
    """Return the strategy in use, with the parameters that it was given."""
    section = setup.config.DISTRIBUTED
    if section.reduction == "ordered":
        return "ordered"
    if setup.world.is_single_process:
        return "none"
    given = [
        f"{key}={shown(value)}" for key, value in section.items() if key not in DISTRIBUTED_KEYS
    ]
    if given:
        return f"{section.strategy}({', '.join(given)})"
    return str(section.strategy)


def settled_changes(setup: Setup, loaded: LoadedCheckpoint) -> list[Change]:
    """Return the changes of the config that shape the trajectory and are consented to.

    Raises:
        ChangedError: a forbidden key differs, or an adjustable one without RUN.allow; both values
            are shown.
    """
    found = differences(loaded.promised["config"], setup.asked, setup.schema)
    allowed = tuple(setup.config.RUN.allow)
    refused = [
        change for change in found if change.resume != "free" and not consented(change, allowed)
    ]
    if refused:
        lines = "\n".join(f"  {_sentence(change)}" for change in refused)
        raise ChangedError(
            f"{setup.config.RUN.dir!r} holds a run with another config; going on would not be the same:\n{lines}\n"
            "Take the old values back, allow what may change, or give this run a folder of its own with RUN.dir=..."
        )
    return [change for change in found if change.resume == "adjustable"]


def settled_data(
    setup: Setup, loaded: LoadedCheckpoint, data: Mapping[str, SplitData]
) -> list[str]:
    """Return a line for each split whose data is not what the checkpoint was made with, if that is
    consented to.

    Raises:
        ChangedError: a fingerprint differs, without RUN.allow=[data]; both are shown.
    """
    before: dict[str, str] = loaded.promised["data"]
    changed = []
    for name, split in data.items():
        now = split.fingerprint()
        then = before.get(name)
        if then is None or now == then:
            continue
        line = f"DATA.{name.upper()}: the data has changed since {loaded.path}: its fingerprint was {then} and is {now}"
        dataset = split.reader.dataset
        if isinstance(dataset, GrowingDataset) and not dataset.continues(then):
            raise ChangedError(
                f"{line}; windows that were there before are gone or have changed, and those that are done are known "
                "by their places: bring them back, let new ones come after them, or start anew with RUN.dir=..."
            )
        if "data" not in setup.config.RUN.allow:
            raise ChangedError(f"{line}; bring the data back, or consent with RUN.allow=[data]")
        changed.append(line)
    return changed


def position(
    setup: Setup, loaded: LoadedCheckpoint, data: Mapping[str, SplitData], stages: Sequence[Stage]
) -> tuple[Plan, RunState, list[str]]:
    """Return plan and position to go on from, and a line for each change.

    The plan in the checkpoint stands; a change of lengths, batch size or data that was consented to
    cuts its rest anew.

    Raises:
        ChangedError: see `settled_data` and `settled_changes`; or the batch size was changed in the
            middle of a pass whose order is made for one.
    """
    other_data = settled_data(setup, loaded, data)
    plan = Plan.from_json(loaded.promised["plan"])
    state = RunState()
    state.load_state_dict(loaded.manifest.state)
    changes = settled_changes(setup, loaded)
    allowed = [*other_data, *(_sentence(change, refused=False) for change in changes)]
    notes = [f"{line} (allowed by RUN.allow)" for line in allowed]
    if other_data or any(change.path.startswith(PLANNED) for change in changes):
        state.finished = ""
        plan = splice(plan, state, stages)
        notes.append(
            f"the rest of the plan is cut anew; `where` goes on from {plan.where(state):.4f}"
        )
    for phase in plan.phases[state.phase :]:
        if (state.step if phase.index == state.phase else 0) < phase.steps:
            check_batches(data[phase.data].at(phase.stage).order, phase)
    return plan, state, notes


def explained(setup: Setup, loaded: LoadedCheckpoint) -> list[str]:
    """Return a line for each difference since the checkpoint that a resume is free to have: config,
    packages, code."""
    changes = differences(loaded.promised["config"], setup.asked, setup.schema)
    lines = [
        f"{change.path}: {shown(change.old)} -> {shown(change.new)} ({_freely(change.path)})"
        for change in changes
        if change.resume == "free" and not change.path.startswith("RUN.")
    ]
    return lines + renewed(setup, loaded)


def renewed(setup: Setup, loaded: LoadedCheckpoint) -> list[str]:
    """Return a line for each package with another version, and each module with another source,
    than then."""
    before: dict[str, Any] = loaded.promised.get("packages", {})
    now: dict[str, Any] = packages()
    lines = [
        f"package {name}: {before[name]} -> {now.get(name)}"
        for name in before
        if before[name] != now.get(name)
    ]
    told = loaded.promised.get("code", {})
    found = code(setup)
    changed = [name for name in told if name in found and told[name] != found[name]]
    return lines + [
        f"the source of {name} has changed; equal bits are promised for equal code"
        for name in changed
    ]


def _freely(path: str) -> str:
    if path.startswith("DISTRIBUTED."):
        return "free: the samples of each update stay the same, the last bits of sums may not"
    return "free: the trajectory stays the same"


def adopted(setup: Setup, loaded: LoadedCheckpoint) -> tuple[Machine, list[str]]:
    """Return the machine with the checkpoint's number of threads where none is set, and what may
    change the bits.

    What a checkpoint of an earlier version does not tell is not compared.
    """
    machine = setup.machine
    before = dict(loaded.promised["environment"])
    if machine.threads is None:
        machine = replace(machine, threads=int(before["threads"]))
    now = environment(setup, machine)
    changed = {
        key: f"{key} {before[key]} -> {value}"
        for key, value in now.items()
        if key in before
        and before[key] != value
        and not (key == "processes" and now["strategy"] == "ordered")
    }
    shares = [changed.pop(key) for key in SHARES if key in changed]
    lines = []
    if changed:
        told = ", ".join(changed.values())
        lines.append(
            f"equal bits are promised on equal machines only; since the checkpoint: {told}"
        )
    if shares:
        lines.append(
            "equal bits are promised for an equal number of processes with an equal strategy only, or with "
            f"DISTRIBUTED.reduction=ordered; the samples of each update stay the same; since the checkpoint: "
            f"{', '.join(shares)}"
        )
    return machine, lines


def departures(
    loaded: LoadedCheckpoint | None, updates: int, given: Sequence[str], changed: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return in what a run is more than its newest command, as JSON data: a run from that command
    alone is another.

    Args:
        loaded: the checkpoint to go on from, which knows those before it; None at the start.
        updates: that are done.
        given: what holds while this attempt lasts, see `given_in_python`; not told again where it
            is on record.
        changed: what is other than in the checkpoint.

    Returns:
        Mappings with `updates`, after which something changed, and `what`, a list of sentences.
    """
    known: list[dict[str, Any]] = (
        [] if loaded is None else list(loaded.promised.get("departures", ()))
    )
    seen = {line for one in known for line in one["what"]}
    new = [*(line for line in given if line not in seen), *changed]
    if new:
        return [*known, {"updates": updates, "what": new}]
    return known


def departures_told(found: Any) -> list[str]:
    """Return a sentence for each entry of `departures`; what was damaged by hand is left out."""
    return [
        (f"from update {one['updates']} on: " if one["updates"] else "from the start: ")
        + " ".join("; ".join(map(str, one["what"])).split())
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict)
        and isinstance(one.get("updates"), int)
        and isinstance(one.get("what"), list)
    ]


def given_in_python(hooks: Mapping[str, Hook], loop: Callable[..., object] | None) -> list[str]:
    """Return a line for each hook, and the loop, that was given in Python and that no command can
    name.

    Args:
        hooks: label -> hook, beside those of the config.
        loop: that of one's own, None for the usual one.
    """
    lines = [
        f"hook {label!r} ({type(hook).__module__}.{type(hook).__qualname__}) is given in Python"
        for label, hook in hooks.items()
        if not hook.observe_only
    ]
    if loop is not None:
        name = loop if isinstance(loop, FunctionType) else type(loop)
        lines.append(f"a loop ({name.__module__}.{name.__qualname__}) is given in Python")
    return lines


def consented(change: Change, allowed: Sequence[str]) -> bool:
    """Tell whether a change may be consented to, and RUN.allow = `allowed` does."""
    named = any(change.path == key or change.path.startswith(f"{key}.") for key in allowed)
    return change.resume == "adjustable" and named


def _sentence(change: Change, *, refused: bool = True) -> str:
    text = f"{change.path}: the checkpoint has {shown(change.old)}, now {shown(change.new)}"
    if not refused:
        return text
    if change.resume == "adjustable":
        return f"{text} (adjustable: allow it with RUN.allow=[{change.path}])"
    return f"{text} (forbidden)"
