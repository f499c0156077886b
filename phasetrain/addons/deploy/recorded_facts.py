"""Facts of a run, for a test or an extraction without the training data."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phasetrain.app.load import read_data_facts
from phasetrain.app.select_checkpoint import NONE
from phasetrain.app.setup import Setup
from phasetrain.config.attrdict import ConfigDict
from phasetrain.runs.view import RunView

log = logging.getLogger(__name__)

SECTIONS = ("MODEL", "LOSS", "TASK", "METERS")
"""Sections whose parts keep the facts that they were trained with."""

MACHINE_FACTS = ("device", "precision", "world")
"""Facts of the machine, which may differ now."""


def complete_from_record(setup: Setup) -> Setup:
    """Return the setup with the facts in plan.json as parameters of the parts that were built from
    them, if it has no training data; else the setup as it is.

    Otherwise the facts of a test split would be used, such as the standard deviation of other
    data. A value of the config takes precedence.

    Args:
        setup: of an engine that reads a checkpoint.
    """
    config = setup.config
    named = str(config.RUN.checkpoint)
    if config.DATA.TRAIN.dataset is not None or named == NONE:
        return setup
    folder, separator, _ = named.rpartition("/checkpoints/")
    folder = folder if separator else config.RUN.dir
    facts = RunView(folder).plan.facts
    of_data = read_data_facts(folder, "train")
    content = config.plain()
    lost = []
    for path, value in facts.items():
        *parents, key = path.split(".")
        section: Any = content
        for name in parents:
            section = section.get(name) if isinstance(section, Mapping) else None
        is_ours = parents and parents[0] in SECTIONS and key not in MACHINE_FACTS
        if not is_ours or not isinstance(section, dict) or section.get(key) is not None:
            continue
        # The facts of the data still have the list from which a loss made a tensor.
        parameter = of_data.get(key, value) if _is_text_of_object(value) else value
        if _is_text_of_object(parameter):
            lost.append(path)
        elif parameter is not None:
            section[key] = parameter
    if lost:
        log.warning(
            "DATA.TRAIN: without training data, %s is taken from a test split, because plan.json "
            "does not hold the value of the run; set DATA.TRAIN to the training data, or let "
            "`facts()` return numbers and lists",
            ", ".join(lost),
        )
    completed = ConfigDict(content)
    stages = tuple(
        ConfigDict({**stage.plain(), **{name: content[name] for name in _list_same(config, stage)}})
        for stage in setup.stages
    )
    return replace(setup, config=completed, stages=stages)


def _is_text_of_object(value: Any) -> bool:
    """Return whether a fact was a tensor or another object, of which JSON holds only the text."""
    return isinstance(value, str) and value.startswith(("tensor(", "<"))


def _list_same(config: Mapping[str, Any], stage: Mapping[str, Any]) -> list[str]:
    """Return the sections that a stage does not change."""
    return [name for name in SECTIONS if stage[name] == config[name]]
