"""Whether a run may resume from a checkpoint: the config, data and environment of the checkpoint
against the present ones."""

import json
import logging
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

import numpy as np
import torch

from phasetrain import __version__
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.app.setup import Setup
from phasetrain.app.stored.leftovers import remove_unknown_keys, warn_of_unknown_keys
from phasetrain.app.train.source_code import hash_sources, list_source_changes
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.promised import read_promised
from phasetrain.config.addons import find_service
from phasetrain.config.changes import Change, compare_configs
from phasetrain.config.problems import format_value
from phasetrain.config.rules.batch import ACCUMULATE, BATCH, MICRO
from phasetrain.config.stages import LENGTHS
from phasetrain.data import GrowingDataset
from phasetrain.data.samplers.phase_sampler import check_batches
from phasetrain.engine.interleave import splice
from phasetrain.engine.plan import Plan, Stage
from phasetrain.engine.position import RunState
from phasetrain.engine.repeats import decode_plan, encode_plan
from phasetrain.errors import ChangedError, PhasetrainError, Problem
from phasetrain.hooks import Hook
from phasetrain.hooks.hidden_state import HeldState
from phasetrain.hooks.observers import classify_hooks, list_observers
from phasetrain.runs.records import format_deviations
from phasetrain.runtime.environment import describe_platform
from phasetrain.runtime.format import format_percent
from phasetrain.runtime.machine import Machine, limit_cpu_capability
from phasetrain.runtime.redaction import Redaction
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import SplitData, Task
from phasetrain.tasks.build.data_builder import WITHOUT
from phasetrain.tasks.build.sections import DISTRIBUTED_KEYS

log = logging.getLogger(__name__)

LENGTH_KEYS = frozenset(f"PHASES.{key}" for key in LENGTHS)
"""Keys that set the length of a run."""

PACKAGES = (
    "torch",
    "numpy",
    "hydra-core",
    "omegaconf",
    "fvcore",
    "fairscale",
    "safetensors",
)
"""Packages that bits depend on; a checkpoint records their versions."""

OBSERVERS_OF_0_1 = ("report", "stragglers", "watchdog")
"""Default hooks of release 0.1, which recorded no observers, that may be missing now."""

SHARDING = ("processes", "strategy")
"""Entries of the environment about how ranks share the work."""

IGNORE_INDEX = "LOSS.ignore_index"

IN_EPOCHS = r"(?i)\d\s*epoch|'every': 'epoch'"
"""Matches a duration in epochs, or a step per epoch, in the text of a config."""

PLANNED = re.compile(r"PHASES\.|DATA\.TRAIN\.batch_size|DATA\.\w+\.every\b")
"""Keys whose change rebuilds the rest of the plan."""


def build_promise(
    run_spec: RunSpec,
    deviations: Sequence[Mapping[str, Any]],
    objects: Mapping[str, Any],
    task: Task,
    hooks: Mapping[str, Hook],
    loaded: LoadedCheckpoint | None,
) -> dict[str, Any]:
    """Return the JSON data that a checkpoint keeps for later attempts to compare with; every rank
    has to call.

    Args:
        run_spec: the run.
        deviations: see `list_deviations`.
        objects: see `phasetrain.app.train.given_objects.describe_objects`.
        task: its task, before the checkpoint is restored.
        hooks: label -> hook.
        loaded: the checkpoint to resume from; None at the start.

    Raises:
        ChangedError: a custom part holds other weights than at the start.
    """
    setup = run_spec.setup
    excluded = task.parts.excluded
    check_held_weights = find_service("check_held_weights")
    return {
        # Checkpoints are shared, and config.yaml has what a resume needs.
        "config": Redaction({}).redact_config(setup.asked),
        "plan": encode_plan(run_spec.plan),
        "data": {name: split.fingerprint() for name, split in run_spec.data.items()},
        "first_samples": {name: split.digest_first() for name, split in run_spec.data.items()},
        "environment": describe_environment(setup, run_spec.machine),
        "packages": list_packages(),
        "platform": describe_platform(run_spec.machine.device.type),
        "code": hash_sources(setup),
        "whole_epochs": True,  # missing in versions that counted a short batch as less than one
        "observers": list(list_observers(setup.asked)),
        "departures": list(deviations),  # the name of the key in existing checkpoints
        **({"objects": objects} if objects else {}),
        **({"excluded": excluded.digests} if excluded else {}),
        **(check_held_weights(setup, task, hooks, loaded) if check_held_weights else {}),
    }


def hash_trial(setup: Setup) -> str:
    """Return a digest of code and config, without the sections RUN and LAUNCH: attempts with equal
    digests do the same."""
    config = {key: value for key, value in setup.asked.items() if key not in ("RUN", "LAUNCH")}
    facts = [config, hash_sources(setup, is_whole=True), list_packages()]
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def list_packages() -> dict[str, str | None]:
    """Return the version of each package that affects a run; None if it is not installed."""
    return {"phasetrain": __version__} | {name: _find_version(name) for name in PACKAGES}


@cache  # reading the metadata of all packages takes 10 ms, three times per run
def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_environment(setup: Setup, machine: Machine) -> dict[str, Any]:
    """Return everything besides config and data that bits depend on: versions, the machine, and how
    ranks share the work."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": machine.device.type,
        # the order of summation, and with it the last bits, depends on the number of threads
        "threads": machine.threads or torch.get_num_threads(),
        "processes": setup.world.size,
        "strategy": _describe_strategy(setup),
    }


def _describe_strategy(setup: Setup) -> str:
    """Return the name of the strategy with its parameters."""
    section = setup.config.DISTRIBUTED
    if section.reduction == "ordered":
        return "ordered"
    if setup.world.is_single_process:
        return "none"
    options = [
        f"{key}={format_value(value)}"
        for key, value in section.items()
        if key not in DISTRIBUTED_KEYS
    ]
    if options:
        return f"{section.strategy}({', '.join(options)})"
    return str(section.strategy)


def check_config_changes(setup: Setup, loaded: LoadedCheckpoint) -> list[Change]:
    """Return the changes of adjustable keys since the checkpoint, all of them allowed.

    Raises:
        ChangedError: a forbidden key has changed, or an adjustable one without RUN.allow; the
            message shows both values.
    """
    warn_of_unknown_keys(loaded.promised["config"], setup.schema, loaded.path)
    changes = list_config_changes(setup, loaded.promised)
    allowed = tuple(setup.config.RUN.allow)
    rejected = [
        change for change in changes if change.resume != "free" and not is_allowed(change, allowed)
    ]
    if rejected:
        raise _changed_error(setup, loaded, rejected)
    return [change for change in changes if change.resume == "adjustable"]


def list_config_changes(setup: Setup, promised: Mapping[str, Any]) -> list[Change]:
    """Return how a config differs from the config of a checkpoint with this promise."""
    # Both redacted: a secret is no part of the run, and may be shown in no message.
    clean = Redaction({})
    before = remove_unknown_keys(clean.redact_config(promised["config"]), setup.schema)
    asked = clean.redact_config(setup.asked)
    recorded = promised.get("observers", OBSERVERS_OF_0_1)
    schema = classify_hooks(setup.schema, before, asked, recorded=recorded)
    changes = compare_configs(before, asked, schema)
    paths = {change.path for change in changes}
    by_samples = _weighed_by_samples(setup, promised)
    return [
        change
        for change in changes
        if not _is_derived_value(change, paths, asked)
        and not (by_samples and change.path == IGNORE_INDEX)
    ]


def _weighed_by_samples(setup: Setup, promised: Mapping[str, Any]) -> bool:
    """Return whether the version of a checkpoint weighted batches with padded targets by samples,
    and the present one weights them by targets."""
    return promised["config"]["LOSS"].get("ignore_index") is None and any(
        line.startswith(IGNORE_INDEX) for line in setup.derived
    )


def _is_derived_value(change: Change, changed: Collection[str], asked: Mapping[str, Any]) -> bool:
    """Return whether a change only writes down the value that was derived before, or leaves it to
    be derived again: `OPTIMIZER.accumulate: null -> 1`."""
    if change.path != ACCUMULATE or MICRO in changed or BATCH in changed:
        return False
    if None not in (change.old, change.new):
        return False
    # With a micro_batch_size every value but the derived one was rejected before.
    is_given = asked["DATA"]["TRAIN"]["micro_batch_size"] is not None
    return is_given or 1 in (change.old, change.new)


def _changed_error(
    setup: Setup, loaded: LoadedCheckpoint, rejected: Sequence[Change]
) -> ChangedError:
    plan = decode_plan(loaded.promised["plan"])
    low_lr = ""
    if warn_before_longer := find_service("warn_before_longer"):
        low_lr = warn_before_longer(setup, rejected, plan, loaded.manifest.state["updates"])
    allowed = {change.path: _suggest_allow(change) for change in rejected}
    if low_lr:
        for path in allowed.keys() & LENGTH_KEYS:
            allowed[path] = "RUN.allow=PHASES PHASES.extend=stretch"
    problems = [
        Problem(
            f"resume.{change.resume}_key",
            _format_change(change, allowed[change.path]),
            key=change.path,
            given=format_value(change.new),
            expected=format_value(change.old),
            suggestion=allowed[change.path],
        )
        for change in rejected
    ]
    lines = [f"  {problem.message}" for problem in problems]
    if low_lr:
        lines.append(low_lr)
    listed = "\n".join(lines)
    return ChangedError(
        f"{setup.config.RUN.dir!r} contains a run with another config; resuming would not give the "
        f"same run:\n{listed}\n"
        "Restore the old values, allow the changes, set RUN.dir to another folder, or start over "
        "with --restart",
        problems=problems,
    )


def check_data_changes(
    setup: Setup,
    loaded: LoadedCheckpoint,
    data: Mapping[str, SplitData],
    *,
    compares_excluded: bool = True,
) -> list[str]:
    """Return a line for each split whose data has changed since the checkpoint, if that is allowed.

    Args:
        setup: the resolved config.
        loaded: the checkpoint.
        data: split -> data.
        compares_excluded: whether the samples of DATA.TRAIN.exclude have to be the same, too.

    Raises:
        ChangedError: a fingerprint differs, without RUN.allow=data; the message shows both.
    """
    before: dict[str, str] = loaded.promised["data"]
    streams: dict[str, list[str]] = loaded.promised.get("first_samples", {})
    changed = []
    for name, split in data.items():
        then = before.get(name)
        if then is None:
            continue  # a split that the run did not have until now has nothing to differ from
        now = split.fingerprint()
        if split.has_fingerprint(then, compares_excluded=compares_excluded):
            first, found = streams.get(name), split.digest_first()
            # A stream that begins elsewhere, or with another seed, may have other samples.
            if not first or found == first or found[:1] != first[:1]:
                continue
            then, now = (f"{now}, first samples {digests[1]}" for digests in (first, found))
        elif not compares_excluded:
            now, then = now.partition(WITHOUT)[0], then.partition(WITHOUT)[0]
        key = f"DATA.{name.upper()}"
        line = (
            f"{key}: the data has changed since {loaded.path}: its fingerprint was {then} and is "
            f"{now}"
        )
        dataset = split.reader.dataset
        if isinstance(dataset, GrowingDataset) and not dataset.continues(then):
            raise ChangedError(
                f"{line}; windows that were there before are gone or have changed, and completed "
                "windows are identified by their index: restore them, append new ones behind them, "
                "or start a new run with RUN.dir=...",
                code="resume.data_changed",
            )
        if "data" not in setup.config.RUN.allow:
            raise ChangedError(
                f"{line}; to train a new run, set RUN.dir to another folder; to resume this one, "
                "restore the data, or allow the change with RUN.allow=data",
                code="resume.data_changed",
            )
        changed.append(line)
    return changed


def restore_position(
    setup: Setup, loaded: LoadedCheckpoint, data: Mapping[str, SplitData], stages: Sequence[Stage]
) -> tuple[Plan, RunState, list[str]]:
    """Return the plan and the position of a checkpoint, and a line for each allowed change.

    The plan of the checkpoint is kept; an allowed change of lengths, batch size or data rebuilds
    the rest of it.

    Raises:
        ChangedError: see `check_data_changes` and `check_config_changes`; or the batch size was
            changed in the middle of an epoch whose order depends on it.
    """
    # Digests and config are compared here, before parts are built and weights are restored: a
    # resume that is refused has cost no time and changed nothing. The config comes first: another
    # config usually names other data, and would be reported as data that has changed.
    changes = check_config_changes(setup, loaded)
    data_changes = check_data_changes(setup, loaded, data)
    plan = decode_plan(loaded.promised["plan"])
    state = RunState()
    state.load_state_dict(loaded.manifest.state)
    notes = [
        f"{line} (allowed by RUN.allow)" for line in (*data_changes, *map(_format_values, changes))
    ]
    if data_changes or any(PLANNED.match(change.path) for change in changes):
        state.reopen()
        plan = splice(plan, state, stages, setup.config.PHASES.extend)
        progress = format_percent(plan.where(state))
        notes.append(
            f"the rest of the plan is rebuilt; schedules are computed for {plan.updates} updates, "
            f"and continue at {progress}"
        )
    elif any(change.path.startswith("HOOKS.") for change in changes):
        # A hook may have ended the run, and with its new parameters the rest of the plan counts.
        state.reopen()
    rest = plan.phases[state.phase :]
    if rest and state.step == rest[0].steps:
        rest = rest[1:]
    for phase, _ in rest.kinds:
        check_batches(data[phase.data].at(phase.stage).order, phase)
    return plan, state, notes


def list_free_changes(setup: Setup, loaded: LoadedCheckpoint) -> list[str]:
    """Return a line for each free key that has changed since the checkpoint."""
    changes = list_config_changes(setup, loaded.promised)
    return [
        f"{change.path}: {format_value(change.old)} -> {format_value(change.new)} "
        f"({_explain_freedom(change)})"
        for change in changes
        if change.resume == "free" and not change.path.startswith("RUN.")
    ]


def list_code_changes(setup: Setup, loaded: LoadedCheckpoint) -> list[str]:
    """Return a line for each package and each source file that has changed since the checkpoint,
    and one if durations in epochs have."""
    before: dict[str, Any] = loaded.promised.get("packages", {})
    now = list_packages()
    lines = []
    if _has_longer_epochs(loaded.promised):
        lines.append(
            "durations in epochs count the update of a short last batch, and an earlier version "
            "counted a part of it; schedules and freezing may have other values from here on"
        )
    if _weighed_by_samples(setup, loaded.promised):
        lines.append(
            f"{IGNORE_INDEX}: batches are weighted by the targets that are not padding, and an "
            "earlier version weighted them by samples; losses and updates may differ from here on"
        )
    lines += [
        f"package {name}: {before[name]} -> {found}"
        for name, found in now.items()
        if name in before and before[name] != found
    ]
    return lines + [
        f"{line}; equal bits are promised for equal code"
        for line in list_source_changes(setup, loaded.promised)
    ]


def _has_longer_epochs(promised: Mapping[str, Any]) -> bool:
    """Return whether durations in epochs may have been shorter in the version of a checkpoint."""
    return bool(
        "whole_epochs" not in promised
        and re.search(IN_EPOCHS, str(promised["config"]))
        and any(
            phase.is_train and phase.end % phase.batch_size
            for phase, _ in decode_plan(promised["plan"]).phases.kinds
        )
    )


def _explain_freedom(change: Change) -> str:
    if change.path.startswith("DISTRIBUTED."):
        return "free: the samples of each update stay the same, the last bits of sums may not"
    if change.path.startswith("MACHINE."):
        return "free: the bits are the same on equal machines only"
    return "free: the trajectory stays the same"


def limit_to_checkpoint(storage: Storage, folder: str) -> None:
    """Limit this process to AVX2 if the newest checkpoint of a run was made with it.

    For runs without MACHINE.cpu_capability, and before anything is computed. The other direction is
    impossible, and `match_machine` warns.
    """
    try:
        promised = read_promised(folder, "latest", storage)
    except PhasetrainError:
        return  # no checkpoint, or none that can be read, as the resume says
    limit_cpu_capability(promised.get("platform", {}).get("cpu_capability"))


def match_machine(setup: Setup, loaded: LoadedCheckpoint) -> tuple[Machine, list[str]]:
    """Return the machine with the checkpoint's number of threads if none is set, and a line for
    each difference that may change bits.

    Facts that a checkpoint of an earlier version lacks are not compared.
    """
    machine = setup.machine
    before = loaded.promised["environment"]
    # The number of threads changes the order of sums, and its default depends on the machine.
    if machine.threads is None:
        machine = replace(machine, threads=int(before["threads"]))
    now = describe_environment(setup, machine)
    changed = {
        key: f"{key} {before[key]} -> {value}"
        for key, value in now.items()
        if key in before
        and before[key] != value
        # ordered reduction gives equal bits for any world size
        and not (key == "processes" and now["strategy"] == "ordered")
    }
    sharding = [changed.pop(key) for key in SHARDING if key in changed]
    processors = loaded.promised.get("platform", {})
    here = describe_platform(machine.device.type)
    changed |= {
        key: f"{key} {format_value(processors[key])} -> {format_value(value)}"
        for key, value in here.items()
        if key in processors and processors[key] != value
    }
    lines = []
    if changed:
        lines.append(
            "equal bits are promised on equal machines only; since the checkpoint: "
            f"{', '.join(changed.values())}"
        )
    if "cpu_capability" in changed:
        lines.append(
            "CPUs with AVX2 and with AVX512 give equal bits if all attempts of a run have "
            "MACHINE.cpu_capability=AVX2"
        )
    if sharding:
        lines.append(
            "equal bits are promised for an equal number of processes with an equal strategy only, "
            "or with DISTRIBUTED.reduction=ordered; the samples of each update stay the same; "
            f"since the checkpoint: {', '.join(sharding)}"
        )
    return machine, lines


def list_deviations(
    loaded: LoadedCheckpoint | None, updates: int, given: Sequence[str], changed: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return, as JSON data, how a run differs from a run of its newest command alone.

    Args:
        loaded: the checkpoint to resume from, with the earlier deviations; None at the start.
        updates: number of completed updates.
        given: lines about this whole attempt, see `list_python_extras`; only new ones are added.
        changed: lines about changes since the checkpoint.

    Returns:
        Mappings with `updates`, after which something changed, and `what`, a list of sentences.
    """
    earlier: list[dict[str, Any]] = []
    if loaded is not None:
        earlier = list(loaded.promised.get("departures", ()))
    seen = {line for deviation in earlier for line in deviation["what"]}
    # A hook given in Python is there again in each attempt, and is recorded by the first.
    new = [*(line for line in given if line not in seen), *changed]
    return [*earlier, {"updates": updates, "what": new}] if new else earlier


def add_lost(
    known: Sequence[dict[str, Any]], updates: int, lines: Mapping[str, list[str]]
) -> list[dict[str, Any]]:
    """Return the result of `list_deviations` with an entry for each new reason why a resume is not
    exact.

    Args:
        known: the result until now.
        updates: number of completed updates.
        lines: sentence -> record of a value, see `record_held`; empty if it is about no value.
    """
    open_ones = (deviation["what"] for deviation in known if "until" not in deviation)
    seen = {line for what in open_ones for line in what}
    return [
        *known,
        *(
            {"updates": updates, "what": [line], "value": value}
            for line, value in lines.items()
            if line not in seen
        ),
    ]


def review_deviations(
    known: Sequence[dict[str, Any]], updates: int, state: HeldState
) -> list[dict[str, Any]]:
    """Return the result of `list_deviations` without hooks and values that the user has declared to
    have no effect; values that are saved from now on get `until`, the number of updates. Warn
    of the values that an earlier attempt has lost."""
    observers = list_python_extras(state.observers, None)
    kept = []
    for deviation in known:
        lost = deviation.get("value") if "until" not in deviation else None
        fate = state.review(lost) if lost else ""
        what = [line for line in deviation["what"] if line not in observers]
        if fate not in ("", "saved") or not what:
            name = ".".join(filter(None, lost[1:])) if lost else deviation["what"][0]
            reason = fate or "declared to have no effect"
            log.info("%s: %s, so it does not make the run inexact", name, reason)
        else:
            kept.append(deviation | {"what": what} | ({"until": updates} if fate else {}))
    # After a resume, an earlier attempt has ended with the error or has accepted it.
    for line in format_deviations([one for one in kept if "value" in one and updates]):
        log.warning("this run is not exact %s", line)
    return kept


def list_python_extras(hooks: Mapping[str, Hook], loop: Callable[..., object] | None) -> list[str]:
    """Return a line for each hook and loop that was given in Python, where no command can name it.

    Args:
        hooks: label -> hook, without the hooks of the config and those that only observe.
        loop: the custom loop; None for the usual one.
    """
    lines = [
        f"hook {label!r} ({type(hook).__module__}.{type(hook).__qualname__}) is given in Python"
        for label, hook in hooks.items()
    ]
    if loop is not None:
        loop_class = loop if isinstance(loop, FunctionType) else type(loop)
        lines.append(
            f"a loop ({loop_class.__module__}.{loop_class.__qualname__}) is given in Python"
        )
    return lines


def is_allowed(change: Change, allowed: Sequence[str]) -> bool:
    """Return whether a change is of an adjustable key that RUN.allow = `allowed` names."""
    is_named = any(change.path == key or change.path.startswith(f"{key}.") for key in allowed)
    return change.resume == "adjustable" and is_named


def _format_change(change: Change, consent: str) -> str:
    """Return a rejected change with the words that allow it."""
    if change.resume == "adjustable":
        note = ""
        if change.path.startswith("HOOKS."):
            note = "; a hook that never changes the training says so with `observe_only = True`"
        return f"{_format_values(change)} (adjustable: allow it with {consent}{note})"
    return f"{_format_values(change)} (forbidden)"


def _format_values(change: Change) -> str:
    old = format_value(change.old)
    return f"{change.path}: the checkpoint has {old}, now {format_value(change.new)}"


def _suggest_allow(change: Change) -> str:
    if change.resume != "adjustable":
        return ""
    # The section, because the length and what schedules do are usually changed together.
    if change.path.startswith("PHASES."):
        return "RUN.allow=PHASES"
    return f"RUN.allow={change.path}"
