"""Show the phases, learning rates, checkpoints and memory of a run before it starts
(RUN.engine=plan)."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from phasetrain.app.build_hooks import build_hooks
from phasetrain.app.preflight.machine_load import format_expected
from phasetrain.app.preflight.rehearsal import Rehearsal, prepare_parts
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.app.preflight.validate import report_all_problems
from phasetrain.app.setup import Setup, describe_dropped, world_size_of
from phasetrain.config.addons import find_service
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.nested import leaves, to_json_value
from phasetrain.config.problems import format_value
from phasetrain.config.rules.derive import list_non_defaults
from phasetrain.config.sections.checkpoint import list_epoch_intervals, list_update_intervals
from phasetrain.config.stages import STAGE_KEYS
from phasetrain.data.samplers.phase_sampler import splits_batches
from phasetrain.engine.plan import TRAIN, Phase, Plan
from phasetrain.meters.base import list_metrics, metric_directions
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.format import (
    format_bytes,
    format_count,
    format_duration,
    format_si,
)
from phasetrain.runtime.redaction import Redaction
from phasetrain.runtime.terminal import KEY_WIDTH
from phasetrain.tasks import Parts, SplitData, Task
from phasetrain.tasks.build.data_builder import count_left_out
from phasetrain.tasks.build.sections import split_item
from phasetrain.tasks.inspection import (
    Inspection,
    ModuleRow,
    checkpoint_bytes,
    memory_estimate,
    modules_of,
    shown_modules,
)

log = logging.getLogger(__name__)

ROWS = 40
"""Maximum number of phases to print; of a longer plan, the first and the last ones."""

SETTINGS = 8
"""Maximum number of values that differ from the defaults to print; `-v` prints all of them."""

LISTED = 1000
"""The same for phases and checkpoints in plan.json, whose size must not grow with the run."""

COUNTED_UPDATES = 100
"""Updates of which the micro-batches are counted."""


def preview(setup: Setup) -> dict[str, Any]:
    """Print the plan of the run, write `plan.json` into its folder, and return its content.

    Opens the datasets, builds the model, and rehearses (`phasetrain.app.preflight.rehearsal`);
    with RUN.rehearse=false it reads no sample.

    Raises:
        ConfigError: lists all mistakes.
    """
    folder = RunFolder(setup.config.RUN.dir)
    is_fresh = not folder.storage.list_names(folder.file("checkpoints"))
    with report_all_problems(setup):
        builder = setup.builder()
        data = builder.data()
        run_spec = RunSpec(
            setup,
            builder,
            data,
            builder.plan(data),
            setup.machine,
            folder,
            is_fresh=is_fresh,
            loads_weights=is_fresh,
        )
        prepared = prepare_parts(run_spec, is_preview=True)
        build_hooks(setup)
    content = describe_plan(run_spec, prepared.task.parts, prepared.rehearsal)
    content["nondeterministic"] = None
    if prepared.rehearsal is not None:  # a plan without one reads no sample
        content["nondeterministic"] = _find_nondeterministic(run_spec, prepared.task)
    _show_plan(setup, content)
    # plan.json belongs to the run: `phasetrain.load` reads facts from it.
    if folder.has_run():
        setup.terminal.say(f"{folder.path} contains a run; its plan.json is not changed")
        return content
    with folder.writing():
        folder.storage.make_folder(folder.path)
        folder.storage.replace_json(folder.file("plan.json"), content, durable=False)
    setup.terminal.say(f"written to {folder.file('plan.json')}")
    return content


def _find_nondeterministic(run_spec: RunSpec, task: Task) -> dict[str, Any] | None:
    """Return the operators of the model without a deterministic kernel, and lines about them."""
    find_operators = find_service("find_operators")
    if find_operators is None:
        return None
    with run_spec.machine.apply_settings():
        content: dict[str, Any] | None = find_operators(
            task,
            run_spec.plan,
            deterministic=run_spec.setup.config.MACHINE.deterministic,
        )
    return content


def describe_plan(
    run_spec: RunSpec, parts: Parts, rehearsal: Rehearsal | None = None
) -> dict[str, Any]:
    """Return the content of plan.json."""
    setup = run_spec.setup
    data = run_spec.data
    plan = run_spec.plan
    weights = list(parts.model.parameters())
    inspection: Inspection | None = None
    rehearsed: dict[str, Any] | None = None
    bytes_each = checkpoint_bytes(parts)
    if rehearsal is not None:
        inspection = rehearsal.inspection
        rehearsed = rehearsal.plain()
        bytes_each = rehearsal.checkpoint_bytes
    modules = modules_of(parts.model)
    inspected: dict[str, Any] | None = None
    if inspection is not None:
        modules = list(inspection.modules)
        inspected = inspection.plain()
        inspected.pop("modules", None)  # an entry of plan.json already
    train = setup.config.DATA.TRAIN
    saves = list(list_checkpoints(setup, plan))
    return {
        "name": setup.config.RUN.name,
        "updates": plan.updates,
        "epochs": plan.epochs,
        "samples": plan.total_samples,
        "processes": {
            "processes": world_size_of(setup.config, setup.place),
            "strategy": setup.config.DISTRIBUTED.strategy,
            "batch_size": train.batch_size,
            "micro_batch_size": train.micro_batch_size,
            "accumulate": setup.config.OPTIMIZER.accumulate,
            "micro_batches": _count_micro_batches(run_spec, parts),
        },
        "data": {
            name: _describe_split(split, parts.loaders[name].settings.workers, setup.config.PHASES)
            for name, split in data.items()
        },
        "stages": list(_describe_stages(setup, plan)),
        "phases": list(_describe_phases(plan, parts)),
        "phases_left_out": max(0, len(plan.phases) - LISTED),
        "model": {
            "name": setup.config.MODEL.name,
            "parameters": sum(p.numel() for p in weights),
            "trained": sum(p.numel() for p in weights if p.requires_grad),
        },
        "modules": [asdict(row) for row in modules],
        "inspection": inspected,
        "memory": memory_estimate(parts, inspection),
        "weights": parts.weights,
        "checkpoints": {
            "at": [list(at) for at in saves[: LISTED // 2] + saves[LISTED // 2 :][-LISTED // 2 :]],
            "count": len(saves),
            "bytes_each": bytes_each,
            "kept": max(2, setup.config.CHECKPOINT.keep_last),
        },
        "groups": [list(row) for row in parts.groups],
        "directions": metric_directions(list_metrics(parts.meters), parts.meters),
        "facts": to_json_value(parts.facts),
        "differs": to_json_value(list_changed_values(setup)),
        "notes": [*setup.dropped, *setup.derived, *_explain_waits(parts)],
        "never": _list_unused(setup, plan),
        "rehearsal": rehearsed,
    }


def _list_unused(setup: Setup, plan: Plan) -> list[str]:
    """Return a sentence for each setting without effect; empty without an add-on that finds
    them."""
    list_unused = find_service("list_unused")
    lines: list[str] = [] if list_unused is None else list_unused(setup, plan)
    return lines


def list_changed_values(setup: Setup) -> list[tuple[str, Any, str]]:
    """Return (path, value, layer) of each value that differs from the defaults, redacted."""
    clean = Redaction(os.environ)
    return [
        (path, clean.redact_config(value, path), layer)
        for path, value, layer in list_non_defaults(setup.composed, setup.schema)
    ]


def _show_plan(setup: Setup, content: dict[str, Any]) -> None:
    terminal = setup.terminal
    _show_summary(setup, content)
    for note in _select_notes(setup, content["notes"]):
        terminal.say(note)
    for key, value in content["facts"].items():
        terminal.say(f"{key} = {format_value(value)} (from {find_fact_source(key)})")
    _show_data(setup, content)
    _show_model(setup, content)
    if content["groups"]:
        terminal.print_table(
            "groups of weights", ("options", "weights", "scalars", "names"), content["groups"]
        )
    for stage in content["stages"]:
        begin = stage["updates_before"]
        span = f"updates {begin} to {begin + stage['updates']}"
        changes = ", ".join(
            f"{key} = {format_value(value)}" for key, value in stage["changes"].items()
        )
        terminal.say(f"stage {stage['index']} ({stage['name']}): {span}; {changes or 'no change'}")
    _show_phases(setup, content)
    _show_rehearsal(setup, content["rehearsal"])
    _show_settings(setup, content["differs"])


def _show_summary(setup: Setup, content: Mapping[str, Any]) -> None:
    """Print facts that are not in the config: length, duration, memory, disk space and warnings."""
    length = ", ".join(
        (
            format_count(content["updates"], "update"),
            format_count(content["samples"], "sample"),
            format_count(content["epochs"], "epoch"),
        )
    )
    rehearsal = content["rehearsal"]
    if rehearsal is not None:
        time = rehearsal["time"]
        length += f"; the run will take about {format_expected(time['expected'], time['load'])}"
    lines = [
        ("plan", length),
        ("memory", _describe_memory(content["memory"])),
        ("disk", _describe_checkpoints(setup, content)),
        *(("warning", line) for line in content["never"]),
    ]
    for word, line in lines:
        setup.terminal.say(f"{word:<{KEY_WIDTH}} {line}")
    _show_nondeterministic(setup, content["nondeterministic"])


def _show_settings(setup: Setup, differs: Sequence[tuple[str, Any, str]]) -> None:
    """Print the values of the config that differ from the defaults, if they are few."""
    if len(differs) > SETTINGS and setup.terminal.verbosity != "verbose":
        setup.terminal.say(
            f"{len(differs)} values differ from the defaults (phasetrain plan -v lists them, with "
            "the file that sets each)"
        )
        return
    rows = [(path, format_value(value), layer) for path, value, layer in differs]
    setup.terminal.print_table(
        "values that differ from the defaults", ("key", "value", "set by"), rows
    )


def _select_notes(setup: Setup, notes: Sequence[str]) -> list[str]:
    """Return the notes worth printing: without values that only fill in a null, unless verbose."""
    if setup.terminal.verbosity == "verbose":
        return list(notes)
    shown = [note for note in notes if ": null -> " not in note and note not in setup.dropped]
    if setup.dropped:
        shown.append(describe_dropped(setup))
    return [note for note in shown if note]


def _show_data(setup: Setup, content: Mapping[str, Any]) -> None:
    head = ("split", "dataset", "samples", "batch", "micro-batch", "workers", "transforms")
    rows = [
        (
            name,
            split["dataset"],
            f"{split['samples']:,}",
            str(split["batch_size"]),
            str(split["micro_batch_size"]),
            str(split["workers"]),
            ", ".join(split["transforms"]) or "none",
        )
        for name, split in content["data"].items()
    ]
    setup.terminal.print_table("data", head, rows)
    for name, split in content["data"].items():
        if split["left_out"]:
            setup.terminal.say(
                f"{name}: {format_count(split['left_out'], 'sample')} left out of each epoch"
            )
    share = content["processes"]
    count = format_count(share["processes"], "process")
    if share["processes"] > 1:
        count += f" ({share['strategy']})"
    setup.terminal.say(
        f"{count}: each update is {format_count(share['batch_size'], 'sample')}, "
        f"{format_count(share['accumulate'], 'micro-batch')} of {share['micro_batch_size']} in "
        "each process"
    )
    if (counts := share["micro_batches"]) is not None:
        setup.terminal.say(
            f"max_tokens splits the micro-batches further: {counts['mean']:.1f} per update, at "
            f"most {counts['most']}, in the first {format_count(counts['updates'], 'update')}"
        )


def _show_model(setup: Setup, content: Mapping[str, Any]) -> None:
    model = content["model"]
    inspection = content["inspection"]
    rows = [
        _format_module(row)
        for row in shown_modules([ModuleRow(**row) for row in content["modules"]])
        # A ReLU or Dropout has a row of its activations only; `-v` shows it.
        if row.parameters or setup.terminal.verbosity == "verbose"
    ]
    head = ("module", "kind", "parameters", "trained", "output", "activations", "flops per sample")
    setup.terminal.print_table(f"model {model['name']}", head, rows)
    if inspection is not None:
        setup.terminal.say(
            "flops per sample with the backward pass: " + format_si(inspection["train_flops"])
        )


def _describe_memory(memory: Mapping[str, int | None]) -> str:
    held = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in memory.items() if size and name != "total"
    )
    return f"about {format_bytes(memory['total'] or 0)} per process: {held}"


def _format_module(row: ModuleRow) -> tuple[str, ...]:
    trained = f"{row.trained:,}"
    if row.trained == row.parameters:
        trained = "all"
    activations = ""
    if row.output:
        activations = format_bytes(row.output_bytes)
    flops = ""
    if row.flops is not None:
        flops = format_si(row.flops)
    parameters = f"{row.parameters:,}"
    name = row.name or "(all)"
    return (name, row.kind, parameters, trained, row.output or "", activations, flops)


def _show_phases(setup: Setup, content: Mapping[str, Any]) -> None:
    head = ("phase", "split", "epoch", "steps", "samples", "updates before", "lr at start")
    has_stages = bool(content["stages"])
    rows = [_format_phase(phase, has_stages=has_stages) for phase in content["phases"]]
    title = (
        f"{format_count(content['epochs'], 'epoch')}, "
        f"{format_count(content['updates'], 'update')}, "
        f"{format_count(content['samples'], 'sample')}"
    )
    setup.terminal.print_table(title, head, _shorten_rows(rows))


def _format_phase(phase: Mapping[str, Any], *, has_stages: bool) -> tuple[str, ...]:
    split: str = phase["split"]
    if has_stages:
        split = f"{split} ({phase['stage']})"
    rate = ""
    if phase["lr"] is not None:
        rate = f"{phase['lr']:.6g}"
    numbers = (phase["epoch"] + 1, phase["steps"], phase["samples"], phase["updates_before"])
    return (str(phase["index"]), split, *map(str, numbers), rate)


def _describe_checkpoints(setup: Setup, content: Mapping[str, Any]) -> str:
    saves = content["checkpoints"]
    size = f"{saves['bytes_each']:,} bytes each"
    if content["rehearsal"] is None:
        size = f"about {size}"  # only a rehearsal has written a checkpoint and knows its size
    count = format_count(saves["count"], "checkpoint")
    line = f"{count} of {size}, the newest {saves['kept']} are kept"
    free = RunFolder(setup.config.RUN.dir).space.free_bytes()
    if free is not None:
        line += f"; {format_bytes(free)} are free"
    return line


def _show_nondeterministic(setup: Setup, nondeterministic: Mapping[str, Any] | None) -> None:
    if nondeterministic is None:
        return
    for line in nondeterministic["lines"]:
        # Only what torch would raise for: the rest may well be trained.
        if line.startswith("MACHINE.deterministic = true"):
            log.error("%s", line)
        else:
            setup.terminal.say(f"note: {line}")


def _show_rehearsal(setup: Setup, rehearsal: Mapping[str, Any] | None) -> None:
    if rehearsal is None:
        return
    time = rehearsal["time"]
    names = "; ".join(row["name"] for row in rehearsal["kinds"])
    setup.terminal.say(
        f"rehearsed in {format_duration(time['rehearsal'])}: {names}. A save took "
        f"{format_duration(time['save'])}, a restore {format_duration(time['restore'])}"
    )


def list_checkpoints(setup: Setup, plan: Plan) -> Iterator[tuple[int, str]]:
    """Yield (updates, reason) of every checkpoint that the rules of section CHECKPOINT save."""
    section = setup.config.CHECKPOINT
    trained = plan.phases.select(plan.phases.is_train)
    is_saved = np.zeros(len(trained), dtype=np.bool_)
    for every in list_epoch_intervals(section):
        is_saved |= trained.ends_epoch & ((trained.column("epoch") + 1) % every == 0)
    updates = 0
    # Numbers rather than phases, of which there may be a million.
    for end, saves in zip(trained.updates_before[1:].tolist(), is_saved.tolist(), strict=True):
        due: set[int] = set()
        for every in list_update_intervals(section):
            due.update(range(updates + every - updates % every, end + 1, every))
        yield from ((at, "update") for at in sorted(due))
        updates = end
        if saves:
            yield updates, "epoch"
    if section.at_end:
        yield updates, "end"


def find_fact_source(key: str) -> str:
    """Return where a fact comes from, such as `DATA` for `MODEL.classes`."""
    name = key.rpartition(".")[2]
    if name in ("split", "part"):
        return "the role of the split"
    if name in ("device", "precision"):
        return "MACHINE"
    if name == "ignore_index":
        return "LOSS"
    if name == "fused":
        return "torch, which has a fused kernel"
    planned = ("epochs", "updates", "updates_per_epoch", "train_batches", "test_batches")
    if name in planned:
        return "PHASES"
    return "DATA"


def _explain_waits(parts: Parts) -> Iterator[str]:
    if parts.updater is not None and parts.updater.waits:
        yield (
            f"OPTIMIZER.name: {type(parts.updater.optimizer).__name__} cannot skip an update on "
            "the device, so each update waits until the device has checked that it is finite; a "
            "fused optimizer, or OPTIMIZER.on_nonfinite=ignore, does not wait"
        )


def _count_micro_batches(run_spec: RunSpec, parts: Parts) -> dict[str, Any] | None:
    """Return the numbers of micro-batches of the first updates on this rank, if the order of the
    samples splits batches by their tokens; else None."""
    phase = run_spec.plan.first_training
    if phase is None or not splits_batches(run_spec.data[TRAIN].order):
        return None
    steps = islice(parts.loaders[TRAIN].sampler.steps(phase), min(phase.steps, COUNTED_UPDATES))
    counts = [len(draws) for draws in steps]
    return {"updates": len(counts), "most": max(counts), "mean": sum(counts) / len(counts)}


def _describe_split(split: SplitData, workers: int, phases: Mapping[str, Any]) -> dict[str, Any]:
    section = split.section
    return {
        "dataset": section.dataset,
        "samples": split.length,
        "batch_size": section.batch_size,
        "micro_batch_size": section.micro_batch_size,
        "drop_last": section.drop_last,
        "left_out": count_left_out(split, phases),
        "workers": workers,
        "sampler": split_item(section.sampler)[0],
        "transforms": [split_item(item)[0] for item in section.transforms],
        "batch_transforms": [split_item(item)[0] for item in section.get("batch_transforms", ())],
        "facts": to_json_value(split.facts),
    }


def _describe_stages(setup: Setup, plan: Plan) -> Iterator[dict[str, Any]]:
    for index, stage in enumerate(setup.config.PHASES.stages):
        begin = plan.updates
        count = 0
        if index < len(plan.stages):  # the plan may end before the last stages
            begin, count = plan.stages[index]
        changes = leaves(
            {key: value for key, value in AttrDict(stage).plain().items() if key not in STAGE_KEYS}
        )
        yield {
            "index": index,
            "name": stage.get("name") or f"stage {index + 1}",
            "updates_before": begin,
            "updates": count,
            "changes": to_json_value(changes),
        }


def _describe_phases(plan: Plan, parts: Parts) -> Iterator[dict[str, Any]]:
    count = len(plan.phases)
    half = LISTED // 2
    for index in (*range(min(half, count)), *range(max(half, count - half), count)):
        phase = plan.phases[index]
        updates = plan.updates_before(index)
        yield asdict(phase) | {
            "samples": phase.samples,
            "updates_before": updates,
            "lr": _lr_at_start(parts, plan, phase),
        }


def _lr_at_start(parts: Parts, plan: Plan, phase: Phase) -> float | None:
    if parts.updater is None or not phase.is_train:
        return None
    # Schedules are functions of the position: the run sets its own at its first step.
    at = plan.position_of(phase, 0)
    parts.updater.begin(at.where, at.stage, at.within, at.epoch_start)
    return parts.updater.lr


def _shorten_rows(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    if len(rows) <= ROWS:
        return list(rows)
    gap = tuple("..." for _ in rows[0])
    return [*rows[: ROWS // 2], gap, *rows[-ROWS // 2 :]]
