"""The position of a run: four counts of completed work, and why the run ended."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

COMPLETED = "completed"
"""Reason of a run that reached the end of its plan."""


class Countable(Protocol):
    """A phase as the position counts it."""

    @property
    def is_train(self) -> bool:
        """Whether a step of the phase is an optimizer update."""
        ...

    def samples_in(self, step: int) -> int:
        """Return the number of samples of a step, over all ranks."""
        ...


@dataclass
class RunState:
    """The position of a run.

    Attributes:
        phase: phases completed; also the index of the current phase in the plan.
        step: steps completed in the current phase.
        updates: optimizer updates attempted in the run.
        samples: training samples consumed in the run, over all ranks.
        finished: why the run ended for good; empty while it runs or was only interrupted.
        stopping: in a checkpoint, why a hook has asked to end the run for good; empty if none has.
        stops_after: in a checkpoint, steps after which the request takes effect: 0, or 1 with
            several ranks, which agree on it in the step after the request.
    """

    phase: int = 0
    step: int = 0
    updates: int = 0
    samples: int = 0
    finished: str = ""
    stopping: str = ""
    stops_after: int = 0

    def finish_step(self, phase: Countable) -> None:
        """Count one more completed step of `phase`."""
        if phase.is_train:
            self.updates += 1
            self.samples += phase.samples_in(self.step)
        self.step += 1

    def finish_phase(self) -> None:
        """Count the current phase as completed."""
        self.phase += 1
        self.step = 0

    def reopen(self) -> None:
        """Forget that the run has ended or was asked to end."""
        self.finished = ""
        self.stopping = ""
        self.stops_after = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a plain dict; a request to stop only if there is one."""
        state = asdict(self)
        if not self.stopping:
            del state["stopping"], state["stops_after"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.phase = int(state["phase"])
        self.step = int(state["step"])
        self.updates = int(state["updates"])
        self.samples = int(state["samples"])
        self.finished = str(state["finished"])
        self.stopping = str(state.get("stopping", ""))
        self.stops_after = int(state.get("stops_after", 0))


class Position(NamedTuple):
    """The position of a step, in completed steps.

    Attributes:
        split: name of the split.
        updates: updates before this step.
        step: steps before it in its pass.
        where: training progress in [0, 1); 1 in the tests after the last update.
        samples: samples of the step, over all ranks; 0 if unknown.
        stage: number of the stage.
        within: progress in the stage in [0, 1); 1 in the tests after its last update.
        epoch_start: `where` and `within` at the first update of the epoch, or where the rest of the
            plan was made again within the epoch; None: the values of the step.
    """

    split: str
    updates: int
    step: int
    where: float
    samples: int = 0
    stage: int = 0
    within: float = 0.0
    epoch_start: tuple[float, float] | None = None
