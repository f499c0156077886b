"""Stages of a run: the config with the changes of each entry of PHASES.stages."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import Merged
from phasetrain.config.compose.sources import Layer
from phasetrain.config.nested import leaves
from phasetrain.config.problems import raise_all
from phasetrain.config.schema import Schema, matches
from phasetrain.errors import Problem, did_you_mean

LENGTHS = ("epochs", "updates", "samples")
"""Keys of PHASES and of a stage; exactly one is set."""

STAGE_KEYS = ("name", "continues", *LENGTHS)
"""Keys of a stage that are not sections."""

CHANGES = (
    "DATA.*.batch_transforms",
    "DATA.*.transforms",
    "DATA.TRAIN.batch_size",
    "DATA.TRAIN.micro_batch_size",
    "DATA.TRAIN.sampler",
    "LOSS",
    "MODEL.freeze",
    "OPTIMIZER.SCHEDULES",
    "OPTIMIZER.accumulate",
    "OPTIMIZER.lr",
    "OPTIMIZER.momentum",
    "OPTIMIZER.weight_decay",
    "PHASES.limit",
    "PHASES.test_every",
)
"""Keys that a stage may change; `*` is a split. All others are the same for the whole run."""


def compose_stages(
    composed: Composed,
    derived: Mapping[str, Any],
    schema: Schema,
    overrides: Sequence[Mapping[str, Any]] = (),
) -> tuple[Composed, ...]:
    """Return the config of each stage; empty if PHASES.stages is.

    Args:
        composed: the config as given, validated except for its stages.
        derived: the same config with derived values.
        schema: the keys.
        overrides: values that no stage changes.

    Raises:
        ConfigError: lists every stage with no length or more than one, and every key that no stage
            may change.
    """
    stages = derived["PHASES"]["stages"]
    splits = list(derived["DATA"])
    raise_all(
        problem
        for number, stage in enumerate(stages)
        for problem in _find_problems(f"PHASES.stages[{number}]", stage, splits)
    )
    return tuple(
        _compose_stage(composed, derived, schema, f"PHASES.stages[{number}]", stage, overrides)
        for number, stage in enumerate(stages)
    )


def _compose_stage(
    composed: Composed,
    derived: Mapping[str, Any],
    schema: Schema,
    name: str,
    stage: Mapping[str, Any],
    overrides: Sequence[Mapping[str, Any]],
) -> Composed:
    config = deepcopy(composed.config)
    # All stages are in the same folder and on the same device.
    config |= {"RUN": deepcopy(derived["RUN"]), "MACHINE": deepcopy(derived["MACHINE"])}
    length = {key: stage.get(key) for key in LENGTHS}
    config["PHASES"] |= {**length, "stages": []}
    # Merged like a layer, so that a stage with another part drops the parameters of the old one.
    merged = Merged(schema)
    merged.values = config
    # A copy: origins of a stage must not appear in messages about the other stages.
    merged.origins = dict(composed.origins)
    changes = {key: deepcopy(value) for key, value in stage.items() if key not in STAGE_KEYS}
    for values in overrides:
        changes = _drop_overridden(changes, values)
    merged.apply(Layer(name, changes))
    origins = merged.origins | {f"PHASES.{key}": name for key in LENGTHS}
    return replace(
        composed,
        config=merged.values,
        origins=origins,
        layers=(*composed.layers, name),
        problems=(),
    )


def _drop_overridden(changes: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a stage without the keys that are in `values`."""
    kept = {}
    for key, change in changes.items():
        given = values.get(key)
        # The parameters of one loss mean nothing to another.
        if key in values and isinstance(change, Mapping) and key != "LOSS":
            kept[key] = _drop_overridden(change, given if isinstance(given, Mapping) else {})
        elif key not in values:
            kept[key] = change
    return kept


def _find_problems(
    stage_key: str, stage: Mapping[str, Any], splits: Sequence[str]
) -> Iterator[Problem]:
    yield from _check_length(stage_key, stage)
    yield from _check_continuation(stage_key, stage)
    if not isinstance(stage.get("name", ""), str):
        message = f"{stage_key}.name = {stage['name']!r}: expected str"
        yield Problem.from_message(message, "config.wrong_type", f"{stage_key}.name")
    data = stage.get("DATA")
    for split in data if isinstance(data, Mapping) else ():
        if split not in splits:
            near = did_you_mean(split, splits) or "."
            key = f"{stage_key}.DATA.{split}"
            message = f"{key}: the run has no such split{near} It has {', '.join(splits)}"
            yield Problem.from_message(message, "config.unknown_split", key)
    changed = leaves({key: value for key, value in stage.items() if key not in STAGE_KEYS})
    for key in stage:
        section, dot, rest = str(key).partition(".")
        if dot and _may_change(str(key)):
            nested = ": {".join([section, *rest.split(".")]) + ": ..." + "}" * (rest.count(".") + 1)
            message = f"{stage_key}.{key}: expected sections and keys inside them, such as {nested}"
            yield Problem.from_message(message, "config.unknown_key", f"{stage_key}.{key}")
    for path in changed:
        if not _may_change(path):
            near = did_you_mean(path, [*STAGE_KEYS, *CHANGES]) or "."
            message = (
                f"{stage_key}.{path}: this key is the same for the whole run{near} A stage may "
                f"change {', '.join(CHANGES)}"
            )
            yield Problem.from_message(message, "config.unchangeable", f"{stage_key}.{path}")


def _check_length(stage_key: str, stage: Mapping[str, Any]) -> Iterator[Problem]:
    lengths = {key: stage[key] for key in LENGTHS if stage.get(key) is not None}
    if len(lengths) != 1:
        listed = " and ".join(f"{key}: {value}" for key, value in lengths.items()) or "no length"
        message = f"{stage_key} has {listed}; give it one of {', '.join(LENGTHS)}"
        yield Problem.from_message(message, "config.conflict", stage_key)
    for key, value in lengths.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            message = f"{stage_key}.{key} = {value!r}: expected int >= 1"
            yield Problem.from_message(message, "config.wrong_type", f"{stage_key}.{key}")


def _check_continuation(stage_key: str, stage: Mapping[str, Any]) -> Iterator[Problem]:
    continues = stage.get("continues", False)
    key = f"{stage_key}.continues"
    if not isinstance(continues, bool):
        message = f"{key} = {continues!r}: expected bool"
        yield Problem.from_message(message, "config.wrong_type", key)
    elif continues and stage_key.endswith("[0]"):
        message = f"{key} = true: there is no stage before the first one; leave it out"
        yield Problem.from_message(message, "config.conflict", key)
    elif continues and "sampler" in (stage.get("DATA") or {}).get("TRAIN", {}):
        message = (
            f"{stage_key}.DATA.TRAIN.sampler: the stage continues the epoch, whose order is "
            "set by the stage before; leave out continues or the sampler"
        )
        yield Problem.from_message(message, "config.conflict", f"{stage_key}.DATA.TRAIN.sampler")


def _may_change(path: str) -> bool:
    """Return whether a path is in CHANGES, or below one of its entries."""
    names = path.split(".")
    above = [".".join(names[:depth]) for depth in range(1, len(names) + 1)]
    return any(matches(prefix, allowed) for prefix in above for allowed in CHANGES)
