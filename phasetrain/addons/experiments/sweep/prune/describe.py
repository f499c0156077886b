"""Describes the settings and the decisions of a pruned sweep, as its record has them."""

from collections.abc import Mapping
from typing import Any

from phasetrain.addons.experiments.sweep.override_text import FOLDER_KEY, PRUNE_KEY
from phasetrain.addons.experiments.sweep.prune.brackets import Standing
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.addons.experiments.sweep.prune_record import PruneRecord
from phasetrain.errors import ConfigError
from phasetrain.runs.direction import Direction


def describe_settings(settings: PruneSettings, monitor: str) -> dict[str, Any]:
    """Return the settings as they are recorded."""
    return {
        "name": settings.name,
        "eta": settings.eta,
        "min": settings.describe_min(),
        "monitor": monitor,
    }


def check_unchanged(folder: str, settings: Mapping[str, Any]) -> PruneRecord | None:
    """Return the record of an earlier call; None if there is none.

    Raises:
        ConfigError: it has other settings (`sweep.prune_changed`).
    """
    record = PruneRecord.read(folder)
    if record is None:
        return None
    for name, value in settings.items():
        before = record.settings.get(name)
        if before != value:
            raise ConfigError(
                f"{PRUNE_KEY}.{name} = {value}: the sweep in {folder} was started with {before}; "
                f"give that, or another folder with {FOLDER_KEY}=FOLDER",
                code="sweep.prune_changed",
            )
    return record


def describe_decisions(
    standings: Mapping[int, Standing], direction: Direction
) -> list[dict[str, Any]]:
    """Return the decisions of all brackets as they are recorded.

    Args:
        standings: first rung of a bracket -> how far it has come.
        direction: which values of the metric are better.
    """
    return [
        {
            "bracket": number,
            "rung": decision.rung + 1,
            # A score is negated if smaller values are better, and so is its negative.
            "values": {
                name: None if score is None else direction.score(score)
                for name, score in decision.scores.items()
            },
            "promoted": list(decision.promoted),
        }
        for number, standing in enumerate(standings.values(), start=1)
        for decision in standing.decisions
    ]
