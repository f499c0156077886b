"""Which checkpoints are kept."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phasetrain.checkpoint.commit import NAME, Manifest, Saved

PINNED = ".pinned"
"""A file `NAME.pinned` beside the checkpoint NAME, made by whoever wants to keep it, keeps it for
good."""


@dataclass(frozen=True)
class Retention:
    """What is kept beside pinned checkpoints and those with a name.

    Attributes:
        last: so many of the newest.
        every_updates: those at multiples of so many updates, or None.
        every_epochs: those made at the end of each so many epochs, or None.
        monitor: `split/metric` by which checkpoints are compared, with a minus sign where smaller
            is better; or None.
        best: so many of the best by `monitor`.
    """

    last: int = 3
    every_updates: int | None = None
    every_epochs: int | None = None
    monitor: str | None = None
    best: int = 1

    def kept(self, found: Sequence[Saved], pinned: Collection[str] = ()) -> set[str]:
        """Return the names to keep of the checkpoints `found`, oldest first.

        Of several at one position the latest commit stands for all. The newest two healthy ones
        always stay.
        """
        latest = list({_position(saved.name): saved for saved in found}.values())
        kept = {*pinned, *(saved.name for saved in latest[-self.last :])}
        kept |= {saved.name for saved in [one for one in latest if one.manifest.facts.healthy][-2:]}
        kept |= {saved.name for saved in self.ranked(latest)[: self.best]}
        kept |= {saved.name for saved in found if saved.manifest.facts.name}
        return kept | {saved.name for saved in latest if self._is_milestone(saved.manifest)}

    def ranked(self, found: Sequence[Saved]) -> list[Saved]:
        """Return the checkpoints whose weights `monitor` has measured, the best first; of equals,
        the first.

        Of several with the same weights (of one number of updates) the newest stands for all. So
        what is the best does not depend on when a run was stopped and saved in between.
        """
        latest = {
            saved.manifest.state["updates"]: saved
            for saved in found
            if self.score(saved) is not None
        }
        return sorted(latest.values(), key=lambda saved: self.score(saved) or 0.0, reverse=True)

    def score(self, saved: Saved) -> float | None:
        """Return the value of `monitor`, greater is better; None where it was not measured or is no
        number."""
        if self.monitor is None:
            return None
        value = saved.manifest.facts.metrics.get(self.monitor.removeprefix("-"))
        if value is None or not math.isfinite(value):
            return None
        if self.monitor.startswith("-"):
            return -value
        return value

    def _is_milestone(self, manifest: Manifest) -> bool:
        updates = int(manifest.state["updates"])
        epochs = manifest.facts.epochs
        by_updates = (
            self.every_updates is not None and updates > 0 and updates % self.every_updates == 0
        )
        return by_updates or bool(self.every_epochs and epochs and epochs % self.every_epochs == 0)


def _position(name: str) -> str:
    found = NAME.fullmatch(name)
    if found:
        return found["position"]
    return name
