"""What a model takes in the stage of its checkpoint: PHASES.stages may change the transforms."""

from collections.abc import Mapping
from typing import Any

from phasetrain.app.load import read_data_facts
from phasetrain.config.schema import is_split
from phasetrain.runs.view import RunView


def select_stage(config: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """Return the config of a run with the section DATA as it is in a stage.

    Args:
        config: from a checkpoint.
        stage: number of the stage, see `find_stage`.
    """
    stages = config.get("PHASES", {}).get("stages") or ()
    if not stages:
        return config
    changes = stages[stage].get("DATA") or {}
    data = {
        name: {**section, **(changes.get(name) or {})} if isinstance(section, Mapping) else section
        for name, section in config["DATA"].items()
    }
    return {**config, "DATA": data}


def select_facts(
    facts: Mapping[str, Any], config: Mapping[str, Any], split: str, stage: int
) -> dict[str, Any]:
    """Return the facts about the data of a split that hold in a stage.

    plan.json has the shape after the transforms of the first stage. Of another shape only the
    number of dimensions is known.

    Args:
        facts: from plan.json.
        config: from the checkpoint.
        split: key of the split in DATA.
        stage: number of the stage.
    """
    first, now = (
        select_stage(config, number)["DATA"][split].get("transforms") for number in (0, stage)
    )
    if first == now:
        return dict(facts)
    kept = {name: value for name, value in facts.items() if name != "input_shape"}
    shape = facts.get("input_shape")
    if isinstance(shape, list):
        kept["sample_rank"] = len(shape)
    return kept


def read_splits(folder: str, config: Mapping[str, Any], stage: int) -> dict[str, dict[str, Any]]:
    """Return split -> its entry in plan.json, with the transforms and facts of a stage.

    Args:
        folder: the run folder.
        config: from the checkpoint.
        stage: number of the stage.
    """
    recorded = RunView(folder).plan.content.get("data")
    splits: dict[str, dict[str, Any]] = {}
    for name, split in recorded.items() if isinstance(recorded, Mapping) else ():
        key = name.upper()
        if not is_split(key) or not isinstance(split, Mapping):
            continue
        splits[name] = {**split, "facts": dict(read_data_facts(folder, name))}
        if stage and key in config["DATA"]:
            section = select_stage(config, stage)["DATA"][key]
            splits[name]["transforms"] = [  # their names, as plan.json has them
                item if isinstance(item, str) else item["name"]
                for item in section.get("transforms") or ()
            ]
            splits[name]["facts"] = select_facts(splits[name]["facts"], config, key, stage)
    return splits
