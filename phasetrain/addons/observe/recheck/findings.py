"""Differences between two computations of one update, as people and programs read them."""

from dataclasses import dataclass

ORDER = (
    "samples",
    "batch content",
    "loss",
    "gradient",
    "gradient norm",
    "weights",
    "buffers",
    "optimizer state",
    "averaged weights",
    "metrics",
)
"""Components of an update, causes before their effects."""

MAX_LISTED = 2
"""Maximum number of tensors that a sentence names."""


@dataclass(frozen=True)
class ChangedValue:
    """A value of an update that was not computed again bit for bit.

    Attributes:
        component: one of `ORDER`, or the name of another part of the task.
        name: name of the tensor or value, such as `trunk.0.weight`.
        changed, entries: number of entries that differ, and of all; 0 if unknown.
    """

    component: str
    name: str
    changed: int = 0
    entries: int = 0

    def __str__(self) -> str:
        """Return the name, and how many of its entries differ."""
        if self.entries > 1:
            return f"{self.name} ({self.changed} of {self.entries} entries)"
        return self.name


def sort_findings(changed: list[ChangedValue]) -> list[ChangedValue]:
    """Return changed values with causes before their effects."""

    def rank(value: ChangedValue) -> int:
        return ORDER.index(value.component) if value.component in ORDER else len(ORDER)

    return sorted(changed, key=rank)


def describe_findings(changed: list[ChangedValue]) -> str:
    """Return the components that differ, each with the first tensors.

    Args:
        changed: result of `sort_findings`.
    """
    components = list(dict.fromkeys(value.component for value in changed))
    texts = []
    for component in components:
        names = [str(value) for value in changed if value.component == component]
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        texts.append(f"{component}: {', '.join(names[:MAX_LISTED])}{more}")
    return "; ".join(texts)
