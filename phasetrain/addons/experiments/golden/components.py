"""Digests of a trace by component, and the first component in which two runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from phasetrain.proof.positions import StepPosition, count_updates
from phasetrain.proof.trace import Trace

COMPONENTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "samples": (
            "batch.*.ids*",
            "the order or number of samples differs: dataset, sampler, batch size or seed",
        ),
        "batch": ("batch.*", "the same samples gave another batch: data, transforms or collation"),
        "output": ("output.*", "the same batch gave another output: the model or its precision"),
        "loss": ("loss*", "the same output gave another loss: the loss or its parameters"),
        "generator": ("generator.*", "the forward pass draws other random numbers"),
        "gradient": (
            "gradient.*",
            "the same loss gave another gradient: the backward pass of the model or the loss",
        ),
        "optimizer": (
            "state.updater*",
            "the same gradient gave another state: the optimizer, its options, or clipping",
        ),
        "weights": (
            "state.model*",
            "the same gradient gave other weights: the optimizer, its options or the schedule",
        ),
        "loss state": ("state.loss*", "a buffer or a parameter of the loss differs"),
        "metrics": ("metrics*", "a meter differs"),
        "logs": ("logs*", "a part logs another value"),
        "hooks": ("hooks*", "the state of a hook differs"),
        "state": ("*", "another state differs: a meter, an average of weights, or a custom part"),
    }
)
"""Component -> pattern of its paths in a trace, and the usual cause if it is the first one that
differs; causes before their effects. The first pattern that matches counts.

Finer than the table of `phasetrain.proof.causes` for ledgers, which has fewer components.
"""

STATES = ("generator", "optimizer", "weights", "loss state", "hooks", "state")
"""Components that are left out at some updates of a long run."""

MOST_STATES = 20
"""Number of updates of a run, about, whose states are recorded."""

START = "initial weights"
LENGTH = "length"
LEDGER = "ledger"
"""Components of the whole run."""

DIGEST_BYTES = 8
"""Size of a digest; it finds changes, nobody forges it."""


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of two runs.

    Attributes:
        update: number of the update.
        at: the step, such as `test step 1`.
        component: one of `COMPONENTS`, or of the whole run.
    """

    update: int
    at: str
    component: str

    @property
    def cause(self) -> str:
        """The usual cause."""
        if self.component == START:
            return "the model, its initialization or the seed differs"
        if self.component in (LENGTH, LEDGER):
            return "the plan, the size of the dataset, or a value that is not recorded differs"
        return COMPONENTS[self.component][1]


def summarize_traces(traces: Sequence[Trace]) -> list[Mapping[str, Any]]:
    """Return the digests of each position by component, with `update` and `at`.

    Args:
        traces: of each rank; a digest is over all ranks.
    """
    phases = traces[0].phases
    updates = sum(phase.steps for phase in phases if phase.is_train)
    every = -(-updates // MOST_STATES)
    steps: list[Mapping[str, Any]] = []
    for position in traces[0].steps:
        update = count_updates(position, phases)
        digests = _digest_components([trace.steps.get(position, {}) for trace in traces])
        if position[1] and update % every:
            digests = {name: digest for name, digest in digests.items() if name not in STATES}
        steps.append({"update": update, "at": _name_step(position, traces[0]), **digests})
    return steps


def find_first_difference(
    recorded: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> FirstDifference | None:
    """Return the first difference between the recorded steps and those of a run, or None."""
    for before, now in zip(recorded, steps, strict=False):
        if (before["update"], before["at"]) != (now["update"], now["at"]):
            return FirstDifference(before["update"], before["at"], LENGTH)
        for component in COMPONENTS:
            if before.get(component) != now.get(component):
                return FirstDifference(before["update"], before["at"], component)
    if len(recorded) != len(steps):
        longer = max(recorded, steps, key=len)[min(len(recorded), len(steps))]
        return FirstDifference(longer["update"], longer["at"], LENGTH)
    return None


def _digest_components(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    hashes: dict[str, Any] = {}
    for digests in ranks:
        for path, digest in sorted(digests.items()):
            component = next(_match_components(path))
            hashes.setdefault(component, blake2b(digest_size=DIGEST_BYTES))
            hashes[component].update(f"{path} {digest};".encode())
    return {name: hashes[name].hexdigest() for name in COMPONENTS if name in hashes}


def _match_components(path: str) -> Iterator[str]:
    return (name for name, (pattern, _) in COMPONENTS.items() if fnmatchcase(path, pattern))


def _name_step(position: StepPosition, trace: Trace) -> str:
    index, step = position
    if step:
        return f"{trace.phases[index].split} step {step}"
    # The position after a phase is the start of the next one.
    return f"end of {trace.phases[max(0, index - 1)].split}"
