"""What a run is going to do: phases, learning rates, checkpoints, before a sample is read (RUN.engine=plan)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.check import shown
from phasetrain.config.derive import overview
from phasetrain.config.layers import leaves
from phasetrain.config.stages import OWN
from phasetrain.folder import RunFolder
from phasetrain.plan import Phase, Plan
from phasetrain.setup import Setup
from phasetrain.tasks import Parts

ROWS = 40
"""Phases that are shown; of a longer plan the first and the last."""


def preview(setup: Setup) -> dict[str, Any]:
    """Print what the run would do, write `plan.json` into its folder, and return its content.

    Opens the data sets and builds the model; reads no sample of the training data.
    """
    builder = setup.builder()
    data = builder.data()
    plan = builder.plan(data)
    folder = RunFolder(setup.config.RUN.dir)
    fresh = not folder.storage.names(folder.file("checkpoints"))
    content = described(setup, plan, builder.parts(data, plan, fresh=fresh))
    show(setup, content)
    if folder.holds_run():
        setup.terminal.say(f"{folder.path} holds a run, whose plan.json stays as it is")
        return content
    with folder.writing():
        folder.storage.make_folder(folder.path)
        folder.storage.replace_json(folder.file("plan.json"), content, durable=False)
    setup.terminal.say(f"written to {folder.file('plan.json')}")
    return content


def described(setup: Setup, plan: Plan, parts: Parts) -> dict[str, Any]:
    """Return the plan and everything known of it as plain JSON data."""
    trained = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    return {
        "name": setup.config.RUN.name,
        "updates": plan.updates,
        "epochs": plan.epochs,
        "samples": plan.total_samples,
        "stages": list(_stages(setup, plan)),
        "phases": list(_phases(plan, parts)),
        "model": {"name": setup.config.MODEL.name, "parameters": parameter_count(parts.model), "trained": trained},
        "weights": parts.weights,
        "checkpoints": {
            "at": [list(at) for at in checkpoints(setup, plan)],
            "bytes_each": checkpoint_bytes(parts),
            "kept": setup.config.CHECKPOINT.keep_last,
        },
        "groups": [list(row) for row in parts.groups],
        "facts": {key: _json(value) for key, value in parts.facts.items()},
        "differs": [[path, _json(value), layer] for path, value, layer in overview(setup.composed, setup.schema)],
        "notes": [*setup.dropped, *setup.derived, *_waits(parts)],
    }


def show(setup: Setup, content: dict[str, Any]) -> None:
    """Print what `described` returns."""
    terminal, checkpoints_of = setup.terminal, content["checkpoints"]
    for note in content["notes"]:
        terminal.say(note)
    differs = [(path, shown(value), layer) for path, value, layer in content["differs"]]
    terminal.table("values that differ from the defaults", ("key", "value", "set by"), differs)
    for key, value in content["facts"].items():
        terminal.say(f"{key} = {shown(value)} (from {source_of_fact(key)})")
    model = content["model"]
    terminal.say(f"model {model['name']}: {model['parameters']:,} parameters, {model['trained']:,} of them trained")
    if content["groups"]:
        terminal.table("groups of weights", ("options", "weights", "scalars", "names"), content["groups"])
    for stage in content["stages"]:
        told = f"updates {stage['updates_before']} to {stage['updates_before'] + stage['updates']}"
        changes = ", ".join(f"{key} = {shown(value)}" for key, value in stage["changes"].items())
        terminal.say(f"stage {stage['index']} ({stage['name']}): {told}; {changes or 'no change'}")
    head = ("phase", "split", "epoch", "steps", "samples", "updates before", "lr at start")
    rows = [
        (
            str(phase["index"]),
            f"{phase['split']} ({phase['stage']})" if content["stages"] else phase["split"],
            str(phase["epoch"] + 1),
            str(phase["steps"]),
            str(phase["samples"]),
            str(phase["updates_before"]),
            "" if phase["lr"] is None else f"{phase['lr']:.6g}",
        )
        for phase in content["phases"]
    ]
    title = f"{content['epochs']} epochs, {content['updates']} updates, {content['samples']} samples"
    terminal.table(title, head, _shortened(rows))
    count = len(checkpoints_of["at"])
    terminal.say(
        f"{count} checkpoints to come of about {checkpoints_of['bytes_each']:,} bytes each, "
        f"the newest {checkpoints_of['kept']} are kept"
    )


def checkpoints(setup: Setup, plan: Plan) -> Iterator[tuple[int, str]]:
    """Yield (updates, why) of every checkpoint that the plan and section CHECKPOINT bring."""
    section, updates = setup.config.CHECKPOINT, 0
    for phase in plan.phases:
        if not phase.is_train:
            continue
        every = section.every_updates
        if every is not None:
            yield from ((at, "update") for at in range(updates + 1, updates + phase.steps + 1) if at % every == 0)
        updates += phase.steps
        if section.every_epochs is not None and phase.ends_epoch and (phase.epoch + 1) % section.every_epochs == 0:
            yield updates, "epoch"
    if section.at_end:
        yield updates, "end"


def checkpoint_bytes(parts: Parts) -> int:
    """Return about how large a checkpoint will be: weights, averages of them, and what the optimizer keeps."""
    models = 1 + len(parts.averages)
    weights: int = models * sum(t.numel() * t.element_size() for t in parts.model.state_dict().values())
    kept: int = 0
    if parts.updater is not None:
        per_weight = 2 if "betas" in parts.updater.optimizer.defaults else 1
        kept = per_weight * sum(p.numel() * p.element_size() for p in parts.updater.parameters)
    return weights + kept


def source_of_fact(key: str) -> str:
    """Return what told a fact, such as `DATA.TRAIN` for `MODEL.classes`."""
    name = key.rpartition(".")[2]
    if name in ("split", "part"):
        return "the role of the split"
    if name in ("device", "precision"):
        return "MACHINE"
    if name == "fused":
        return "torch, which has a fused kernel"
    planned = ("epochs", "updates", "updates_per_epoch", "train_batches", "test_batches")
    return "PHASES" if name in planned else "DATA.TRAIN"


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def _waits(parts: Parts) -> Iterator[str]:
    if parts.updater is not None and parts.updater.waits:
        yield (
            f"OPTIMIZER.name: {type(parts.updater.optimizer).__name__} cannot withhold an update on the device, so "
            "each update waits until the device has seen that it is finite; a fused optimizer, or "
            "OPTIMIZER.on_nonfinite=ignore, does not wait"
        )


def _stages(setup: Setup, plan: Plan) -> Iterator[dict[str, Any]]:
    for index, stage in enumerate(setup.config.PHASES.stages):
        begin, count = plan.stages[index] if index < len(plan.stages) else (plan.updates, 0)
        changes = leaves({key: value for key, value in AttrDict(stage).plain().items() if key not in OWN})
        name = stage.get("name") or f"stage {index + 1}"
        yield {"index": index, "name": name, "updates_before": begin, "updates": count, "changes": _json(changes)}


def _phases(plan: Plan, parts: Parts) -> Iterator[dict[str, Any]]:
    updates = 0
    for phase in plan.phases:
        yield asdict(phase) | {
            "samples": phase.samples,
            "updates_before": updates,
            "lr": _lr(parts, plan, phase, updates),
        }
        updates += phase.steps if phase.is_train else 0


def _lr(parts: Parts, plan: Plan, phase: Phase, updates: int) -> float | None:
    if parts.updater is None or not phase.is_train:
        return None
    parts.updater.schedule(plan.where_at(updates), phase.stage, plan.within(phase.stage, updates))
    return parts.updater.lr


def _shortened(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    if len(rows) <= ROWS:
        return list(rows)
    gap = tuple("..." for _ in rows[0])
    return [*rows[: ROWS // 2], gap, *rows[-ROWS // 2 :]]


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
