"""Finds the first difference between the traces of two runs, and its usual cause."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phasetrain.engine.plan import Plan
from phasetrain.proof.trace import Digests, Place, Trace

CAUSES = {
    "batch": (
        "another batch: a dataset, transform, sampler, collate function or hook uses a random "
        "generator that the run does not seed, counts its calls, or reads the clock; let it draw "
        "from the global generators, which are seeded before each sample, or take keys "
        "(BatchTransform)"
    ),
    "output": (
        "the same batch gave another output: the model holds something that is not in its "
        "state_dict (a Python number, a list, a buffer with persistent=False), uses a random "
        "generator that the run does not seed, reads the clock, or has an operator that gives "
        "other bits each time"
    ),
    "generator": (
        "the model or a hook draws another number of random numbers in this step; it counts its "
        "calls, or branches on a value that is not in its state_dict"
    ),
    "loss": (
        "the same output gave another loss: the loss or the task holds something that is not in "
        "its state_dict (a Python number, a list, a buffer with persistent=False), uses a random "
        "generator that the run does not seed, or reads the clock"
    ),
    "gradient": (
        "the same loss gave another gradient: an operator of the model or of the loss has a "
        "backward pass that gives other bits each time; MACHINE.deterministic=true rejects those "
        "of torch, and `phasetrain plan` names them"
    ),
    "logs": "a part logs a value that is not a function of the step, such as a time",
    "metrics": "a meter holds something that is not one of its buffers",
    "hooks": (
        "the hook's state_dict is incomplete, or its load_state_dict does not load all of it"
    ),
    "state": (
        "the part holds something that is not in its state_dict, uses a random generator that the "
        "run does not seed, or reads the clock; if weights differ after equal gradients, that is "
        "the optimizer"
    ),
}
"""Usual causes, by the first component of the first path that differs."""

NOT_LOADED = "load_state_dict does not restore the state that state_dict returned"


@dataclass(frozen=True)
class PhaseLabel:
    """The facts of a phase in a message: its split, its epoch, its steps, whether it trains."""

    split: str
    epoch: int
    steps: int
    is_train: bool


@dataclass(frozen=True)
class TraceDifference:
    """The first difference of a trace.

    Attributes:
        place: the position after the step.
        path: the first path that differs, such as `state.model.head.weight`.
        is_restored: it differs right after a restore, before any step.
    """

    place: Place
    path: str
    is_restored: bool = False

    @property
    def cause(self) -> str:
        """The usual cause."""
        if self.is_restored:
            return NOT_LOADED
        return CAUSES[self.path.partition(".")[0]]

    @property
    def component(self) -> str:
        """The section of the config to look at, such as `MODEL` or `METERS.accuracy`."""
        kind, _, rest = self.path.partition(".")
        found = {
            "batch": "DATA",
            "output": "MODEL",
            "generator": "MODEL",
            "loss": "LOSS",
            "gradient": "MODEL",
        }
        if kind == "metrics":
            return f"METERS.{rest.partition('.')[0].partition('/')[0]}"
        if kind == "hooks":
            return f"HOOKS.{rest.partition('.')[0]}"
        # The gradients were equal, so the optimizer has moved the weights in another way.
        if kind == "state" and not self.is_restored and rest.startswith(("model.", "loss.")):
            return "OPTIMIZER"
        if kind == "state":
            return _name_stateful(rest)
        return found.get(kind, "TASK")


def _name_stateful(path: str) -> str:
    kind, _, rest = path.partition(".")
    label = rest.partition(".")[0]
    if kind == "meter":
        return f"METERS.{label}"
    if kind == "data":
        return f"DATA.{label.upper()}"
    return {"model": "MODEL", "loss": "LOSS", "updater": "OPTIMIZER"}.get(kind, "TASK")


def find_difference(reference: Trace, attempt: Trace) -> TraceDifference | None:
    """Return the first difference of an attempt from the run without kills, or None."""
    if attempt.restored is not None:
        place, state = attempt.restored
        expected = {
            path: value
            for path, value in reference.moments.get(place, {}).items()
            if path.startswith("state.")
        }
        # The first path is enough: later ones may follow from it.
        for path in _differing_paths(expected, state):
            return TraceDifference(place, path, is_restored=True)
    for place, moment in attempt.moments.items():
        for path in _differing_paths(reference.moments.get(place, {}), moment):
            return TraceDifference(place, path)
    return None


def _differing_paths(one: Digests, other: Digests) -> Iterator[str]:
    """Yield the paths that differ, in the order of the first."""
    return (path for path in {**one, **other} if one.get(path) != other.get(path))


def label_phases(plan: Plan) -> list[PhaseLabel]:
    """Return the labels of all phases of a short plan."""
    return [
        PhaseLabel(phase.split, phase.epoch, phase.steps, phase.is_train) for phase in plan.phases
    ]


def describe_place(place: Place, phases: Sequence[PhaseLabel]) -> str:
    """Return a position as text."""
    index, step = place
    if step == 0:  # the position after a phase is the start of the next one
        index -= 1
        phase = phases[index]
        return f"the end of phase {index} ({phase.split}, epoch {phase.epoch})"
    phase = phases[index]
    total = sum(one.steps for one in phases[:index]) + step
    where = f"step {step} of phase {index}, {phase.split}, epoch {phase.epoch}"
    return f"step {total} of the run ({where})"


def count_updates(place: Place, phases: Sequence[PhaseLabel]) -> int:
    """Return the number of updates up to a position."""
    index, step = place
    done = sum(one.steps for one in phases[:index] if one.is_train)
    if index < len(phases) and phases[index].is_train:
        return done + step
    return done
