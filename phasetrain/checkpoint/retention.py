"""Decides which checkpoints are kept."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phasetrain.checkpoint.commit import NAME, Manifest, Saved
from phasetrain.runs.direction import Objective

PINNED = ".pinned"
"""A file `NAME.pinned`, created by the user, protects the checkpoint NAME from deletion."""


@dataclass(frozen=True)
class Retention:
    """Rules for the checkpoints to keep, in addition to pinned and named ones.

    Attributes:
        last: number of newest checkpoints, at least 2: the newest may turn out to be damaged.
        every_updates: keep checkpoints at multiples of this number of updates, or None.
        every_epochs: keep checkpoints at the end of every n-th epoch, or None.
        monitor: `split/metric` by which checkpoints are ranked, with a minus sign if smaller is
            better; or None.
        best: number of best checkpoints by `monitor`.
    """

    last: int = 3
    every_updates: int | None = None
    every_epochs: int | None = None
    monitor: str | None = None
    best: int = 1

    def select_names(self, found: Sequence[Saved], pinned: Collection[str] = ()) -> set[str]:
        """Return the names of the checkpoints to keep.

        Args:
            found: all checkpoints, oldest first; of several at one position, only the latest
                commit counts.
            pinned: names of pinned checkpoints.
        """
        # Several commits of one position come from repeated interruptions there.
        latest = list({_position_in_name(saved.name): saved for saved in found}.values())
        healthy = [saved for saved in latest if saved.manifest.facts.healthy]
        chosen = [
            *latest[-max(self.last, 2) :],
            *healthy[-2:],
            *self.rank_by_monitor(latest)[: self.best],
            *(saved for saved in found if saved.manifest.facts.name),
            *(saved for saved in latest if self._is_milestone(saved.manifest)),
        ]
        return {*pinned, *(saved.name for saved in chosen)}

    def rank_by_monitor(self, found: Sequence[Saved]) -> list[Saved]:
        """Return the checkpoints for which `monitor` was measured, best first; ties by age.

        Of several with the same number of updates, and so the same weights, only the newest is
        returned: the ranking does not depend on interruptions.
        """
        latest = {
            saved.manifest.state["updates"]: saved
            for saved in found
            if self.score(saved) is not None
        }
        # sorted() is stable: of equal scores, the oldest checkpoint comes first.
        return sorted(latest.values(), key=lambda saved: self.score(saved) or 0.0, reverse=True)

    def score(self, saved: Saved) -> float | None:
        """Return the value of `monitor`, where greater is better; None if it was not measured or is
        not finite."""
        if self.monitor is None:
            return None
        objective = Objective.parse(self.monitor)
        value = saved.manifest.facts.metrics.get(objective.metric)
        if value is None or not math.isfinite(value):
            return None
        return objective.direction.score(value)

    def _is_milestone(self, manifest: Manifest) -> bool:
        updates = int(manifest.state["updates"])
        epochs = manifest.facts.epochs
        by_updates = (
            self.every_updates is not None and updates > 0 and updates % self.every_updates == 0
        )
        return by_updates or bool(self.every_epochs and epochs and epochs % self.every_epochs == 0)


def _position_in_name(name: str) -> str:
    match = NAME.fullmatch(name)
    if match:
        return match["position"]
    return name
