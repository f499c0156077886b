"""The stages of a run: its config as each entry of PHASES.stages changes it."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import Merged, leaves
from phasetrain.config.compose.sources import Layer
from phasetrain.config.problems import raise_all
from phasetrain.config.schema import Schema
from phasetrain.errors import did_you_mean

LENGTHS = ("epochs", "updates", "samples")
"""Keys of PHASES, and of a stage, of which one is set."""

OWN = ("name", *LENGTHS)
"""Keys of a stage that are no sections."""

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
"""What may change in a run; `*` is a split. All else is one for the whole run."""


def staged(composed: Composed, settled: Mapping[str, Any], schema: Schema) -> tuple[Composed, ...]:
    """Return the config of each stage; none where PHASES.stages is empty.

    Args:
        composed: what was asked for, checked but for its stages.
        settled: the same config with all that follows from it.
        schema: the keys.

    Raises:
        ConfigError: lists every stage without a length of its own or with more than one, and every
            key that no stage may change.
    """
    stages = settled["PHASES"]["stages"]
    splits = list(settled["DATA"])
    problems = [
        problem
        for number, stage in enumerate(stages)
        for problem in _problems(f"[{number}]", stage, splits)
    ]
    raise_all([f"PHASES.stages{problem}" for problem in problems])
    return tuple(
        _stage(composed, settled, schema, number, stage) for number, stage in enumerate(stages)
    )


def _stage(
    composed: Composed,
    settled: Mapping[str, Any],
    schema: Schema,
    number: int,
    stage: Mapping[str, Any],
) -> Composed:
    config = deepcopy(composed.config)
    name = f"PHASES.stages[{number}]"
    config |= {"RUN": deepcopy(settled["RUN"]), "MACHINE": deepcopy(settled["MACHINE"])}
    config["PHASES"] |= (
        dict.fromkeys(LENGTHS)
        | {key: stage[key] for key in LENGTHS if key in stage}
        | {"stages": []}
    )
    merged = Merged(schema)
    merged.values = config
    merged.origins = dict(composed.origins)
    merged.apply(
        Layer(name, {key: deepcopy(value) for key, value in stage.items() if key not in OWN})
    )
    origins = merged.origins | {f"PHASES.{key}": name for key in LENGTHS}
    return replace(
        composed,
        config=merged.values,
        origins=origins,
        layers=(*composed.layers, name),
        problems=(),
    )


def _problems(where: str, stage: Mapping[str, Any], splits: Sequence[str]) -> list[str]:
    given = [key for key in LENGTHS if stage.get(key) is not None]
    found = []
    if len(given) != 1:
        told = " and ".join(f"{key}: {stage[key]}" for key in given) or "no length"
        found.append(f"{where} has {told}; give it one of {', '.join(LENGTHS)}")
    if any(
        isinstance(stage[key], bool) or not isinstance(stage[key], int) or stage[key] < 1
        for key in given
    ):
        told = ", ".join(f"{key} = {stage[key]!r}" for key in given)
        found.append(f"{where}: {told}: expected a whole number of at least 1")
    if not isinstance(stage.get("name", ""), str):
        found.append(f"{where}.name = {stage['name']!r}: expected a word")
    data = stage.get("DATA")
    for split in data if isinstance(data, Mapping) else ():
        if split not in splits:
            near = did_you_mean(split, splits) or "."
            found.append(
                f"{where}.DATA.{split}: the run has no such split{near} It has {', '.join(splits)}"
            )
    changed = leaves({key: value for key, value in stage.items() if key not in OWN})
    for path in (path for path in changed if not _may_change(path)):
        near = did_you_mean(path, [*OWN, *CHANGES])
        found.append(
            f"{where}.{path}: this is one for the whole run{near or '.'} A stage may change {', '.join(CHANGES)}"
        )
    return found


def _may_change(path: str) -> bool:
    names = path.split(".")
    for allowed in CHANGES:
        wanted = allowed.split(".")
        if len(names) >= len(wanted) and all(
            w in ("*", n) for w, n in zip(wanted, names, strict=False)
        ):
            return True
    return False
