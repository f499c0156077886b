"""The events within a step, which train and test steps call."""

from collections.abc import Callable, Mapping, Sequence
from inspect import unwrap
from typing import Any, TypeVar

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import Run
from phasetrain.optim import NonFinite
from phasetrain.tasks.parts import StepEvents

R = TypeVar("R")


class HookEvents(StepEvents):
    """Calls the hooks of a run at the events within the steps of a phase.

    Args:
        calls: event -> what to call; a hook may be added to it while the phase runs.
        run: the run.
        phase: the phase.
    """

    def __init__(
        self, calls: Mapping[str, Sequence[Callable[..., Any]]], run: Run, phase: Phase
    ) -> None:
        self._calls = calls
        self._run = run
        self._phase = phase

    def on_batch(self, batch: Batch) -> Batch:
        """Return the batch, or its replacement by hooks."""
        for call in self._calls["on_batch"]:
            # None leaves the batch as it is; a guarded hook that has failed returns None as well.
            changed = call(self._run, self._phase, batch)
            if changed is not None:
                batch = _require_type(changed, Batch, "on_batch", call)
        return batch

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Return the output, or its replacement by hooks."""
        for call in self._calls["on_forward"]:
            changed = call(self._run, self._phase, out)
            if changed is not None:
                out = _require_type(changed, StepOutput, "on_forward", call)
        return out

    def on_backward(self, out: StepOutput) -> None:
        """Call `on_backward` of all hooks."""
        for call in self._calls["on_backward"]:
            call(self._run, self._phase, out)

    def on_update(self) -> None:
        """Call `on_update` of all hooks."""
        for call in self._calls["on_update"]:
            call(self._run, self._phase)

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Call `on_skip` of all hooks."""
        for call in self._calls["on_skip"]:
            call(self._run, self._phase, batches, found)


def _require_type(value: Any, expected: type[R], event: str, call: Callable[..., Any]) -> R:
    if not isinstance(value, expected):
        hook = getattr(unwrap(call), "__self__", None)
        name = "a hook" if hook is None else type(hook).__name__
        raise ConfigError(
            f"HOOKS: {event} of {name} returned a {type(value).__name__}; expected a "
            f"{expected.__name__} or None, such as `dataclasses.replace` of its last argument",
            code="hooks.wrong_result",
        )
    return value
