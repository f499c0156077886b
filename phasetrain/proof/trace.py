"""Records digests of the batches, losses and states of each step, to compare two runs."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from phasetrain.distributed.dtensors import local_shard
from phasetrain.engine.batch import Batch, StepOutput, mapped
from phasetrain.engine.plan import Phase, Plan
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.runtime.compare import digest_leaves

Place = tuple[int, int]
"""Number of completed phases, and of completed steps in the current one."""

Digests = dict[str, str]
"""Path -> digest."""


class Trace(Hook):
    """Records digests of batches, losses, metrics and states, by the position after the step.

    Attributes:
        moments: position -> path -> digest; batches first, then outputs, generators, gradients,
            losses and metrics, then states.
        restored: the position of a resume, and the state of the task at it; None in a first
            attempt.
        plan: the plan of the run.
    """

    main_only = False  # each rank reads other batches
    observe_only = True

    def __init__(self) -> None:
        self.moments: dict[Place, Digests] = {}
        self.restored: tuple[Place, Digests] | None = None
        self.plan: Plan | None = None
        self._batches: Digests = {}
        self._passes: Digests = {}
        self._count = 0

    def on_start(self, run: Run) -> None:
        """Keep the plan."""
        self.plan = run.plan

    def on_load(self, run: Run) -> None:
        """Record the restored state."""
        self.keep_restored(_position(run), _digest_task(run))

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Forget the batches of a step that was not completed."""
        self._forget_step()

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Record a micro-batch, after other hooks have changed it."""
        content = {
            "ids": batch.ids,
            "input": batch.input,
            "target": batch.target,
            "mask": batch.mask,
        }
        # Copied to digests at once: the step may change the tensors in place.
        self._batches |= digest_leaves(content, f"batch.{len(self._batches) // len(content)}")

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the output of the model, and the generators that it has drawn from."""
        # Here and not in `on_step`: between two steps, a loader without workers draws as well.
        self._passes |= digest_leaves(list(_list_tensors(out.output)), f"output.{self._count}")
        self._passes |= digest_leaves(_generator_states(), f"generator.{self._count}")
        self._count += 1

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the gradients up to this micro-batch."""
        found = {
            name: local_shard(weight.grad)
            for name, weight in run.task.parts.model.named_parameters()
            if weight.grad is not None
        }
        self._passes |= digest_leaves(found, f"gradient.{self._count - 1}")

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the loss and states after a step."""
        # The loss before the gradients, as in the step: the first difference is the nearest cause.
        loss = digest_leaves(out.loss, "loss")
        forward = {path: at for path, at in self._passes.items() if path.startswith("output.")}
        found = self._batches | forward | loss | self._passes
        found |= digest_leaves(out.logs, "logs") | _digest_task(run) | _digest_hooks(run)
        self.keep_moment(_position(run), found)
        self._forget_step()

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record metrics and states after a phase."""
        self.keep_moment(
            _position(run),
            digest_leaves(dict(metrics), "metrics") | _digest_task(run) | _digest_hooks(run),
        )

    def on_end(self, run: Run) -> None:
        """Record the states at the end."""
        self.keep_moment(
            _position(run),
            self.moments.get(_position(run), {}) | _digest_task(run) | _digest_hooks(run),
        )

    def keep_restored(self, place: Place, found: Digests) -> None:
        """Keep the digests of a restored state."""
        self.restored = place, found

    def keep_moment(self, place: Place, found: Digests) -> None:
        """Keep the digests at a position."""
        self.moments[place] = found

    def _forget_step(self) -> None:
        self._batches = {}
        self._passes = {}
        self._count = 0


def _position(run: Run) -> Place:
    return run.state.phase, run.state.step


def _digest_task(run: Run) -> Digests:
    # Of a tensor that several ranks share, each rank compares its own shard.
    parts = {
        name: mapped(part.state_dict(), local_shard) for name, part in run.task.stateful().items()
    }
    return digest_leaves(parts, "state")


def _digest_hooks(run: Run) -> Digests:
    """Return digests of the states of custom hooks."""
    # Built-in hooks store offsets in log files, which differ between otherwise equal runs.
    builtin = _builtin_hooks()
    states: dict[str, Any] = {}
    for label, hook in run.hooks.by_label.items():
        if label in ("checkpoint", "latest") or type(hook) in builtin:
            continue
        state = hook.state_dict()
        if state:
            states[label] = state
    return digest_leaves(states, "hooks")


def _builtin_hooks() -> set[Any]:
    return {kind for kind in HOOKS.values() if kind.__module__.startswith("phasetrain.hooks.")}


def _list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an output; other things in it may have no value to compare."""
    found: list[torch.Tensor] = []
    mapped(value, found.append)
    yield from found


def _generator_states() -> dict[str, torch.Tensor]:
    """Return the state of torch's generators, which each pass is seeded for.

    Python's and NumPy's are left out: they are seeded only for models that draw from them.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states
