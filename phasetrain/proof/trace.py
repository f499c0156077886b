"""Records digests of the inputs, results and state of each step, to compare two runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from phasetrain.proof.digest import digest_leaves
from phasetrain.proof.positions import PhaseLabel, StepPosition
from phasetrain.runtime.nested import list_tensors

Digests = dict[str, str]
"""Path -> digest."""

FIRST = ("batch", "output", "loss")
"""The first paths of a step: the first difference in it is then the nearest to the cause."""


class Trace:
    """Digests of batches, outputs, losses, gradients, metrics and states, by the position after the
    step.

    Attributes:
        steps: position -> path -> digest; batches first, then outputs, losses, generators and
            gradients, then logs, metrics and states.
        restored: the position of a resume, and the state of the task at it; None in a first
            attempt.
        phases: the phases of the run; empty before it began.
        passes: number of forward passes of the current step.
    """

    def __init__(self) -> None:
        self.steps: dict[StepPosition, Digests] = {}
        self.restored: tuple[StepPosition, Digests] | None = None
        self.phases: Sequence[PhaseLabel] = ()
        self._step: Digests = {}
        self._batches = 0
        self.passes = 0

    def begin(self, phases: Sequence[PhaseLabel], rank: int = 0) -> None:
        """Keep the phases of the run."""
        self.phases = phases

    def drop_step(self) -> None:
        """Forget the records since the last step ended."""
        self._step = {}
        self._batches = 0
        self.passes = 0

    # Digests at once, no references: the step may change the tensors in place.
    def record(self, path: str, value: Any) -> None:
        """Record a nested value of the current step."""
        self._step |= digest_leaves(value, path)

    def record_batch(self, batch: Any) -> None:
        """Record the next micro-batch of the step, a `phasetrain.engine.batch.Batch`."""
        fields = {
            "ids": batch.ids,
            "input": batch.input,
            "target": batch.target,
            "mask": batch.mask,
        }
        self.record(f"batch.{self._batches}", fields)
        self._batches += 1

    def record_output(self, output: Any) -> None:
        """Record the output of the model for the next micro-batch."""
        # Only tensors: other things in it may have no value to compare.
        self.record(f"output.{self.passes}", list_tensors(output))
        self.passes += 1

    def record_generators(self) -> None:
        """Record torch's generators after the forward pass, which each pass is seeded for.

        Python's and NumPy's are left out: they are seeded only for models that draw from them.
        """
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = torch.cuda.get_rng_state()
        self.record(f"generator.{self.passes - 1}", states)

    def record_gradients(self, model: torch.nn.Module) -> None:
        """Record the gradients up to this micro-batch."""
        gradients = {
            name: weight.grad
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        self.record(f"gradient.{self.passes - 1}", gradients)

    def record_state(self, parts: Mapping[str, Any]) -> None:
        """Record the states of parts by name."""
        self._step |= digest_state(parts)

    def end_step(self, position: StepPosition) -> None:
        """Keep the records since the last step ended, under the position after it."""
        step = {path: self._step[path] for path in _sort_paths(self._step)}
        self.drop_step()
        # The end of the run is at the position of the end of its last phase.
        self.keep_step(position, self.steps.get(position, {}) | step)

    def keep_restored(self, position: StepPosition, state: Digests) -> None:
        """Keep the digests of a restored state."""
        self.restored = position, state

    def keep_step(self, position: StepPosition, step: Digests) -> None:
        """Keep the digests at a position."""
        self.steps[position] = step


def digest_state(parts: Mapping[str, Any]) -> Digests:
    """Return digests of the states of parts by name."""
    return digest_leaves({name: part.state_dict() for name, part in parts.items()}, "state")


def _sort_paths(paths: Iterable[str]) -> list[str]:
    """Return the paths in `FIRST` first, others in the order in which they were recorded."""

    def rank(path: str) -> int:
        first = path.partition(".")[0]
        return FIRST.index(first) if first in FIRST else len(FIRST)

    return sorted(paths, key=rank)
