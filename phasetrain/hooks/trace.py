"""Records the trace of a whole run, to compare it with another run."""

from collections.abc import Mapping
from typing import Any

from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase, Plan
from phasetrain.hooks.base import Hook, Run
from phasetrain.proof.positions import PhaseLabel, StepPosition
from phasetrain.proof.trace import Trace, digest_state


class TraceHook(Hook):
    """Records digests of batches, losses, metrics and states after every step and phase.

    Args:
        trace: gets the digests.

    Attributes:
        plan: the plan of the run; None before it began.
    """

    main_only = False  # each rank reads other batches
    observe_only = True

    def __init__(self, trace: Trace) -> None:
        self.plan: Plan | None = None
        self._trace = trace

    def on_start(self, run: Run) -> None:
        """Keep the phases of the plan, which is a short one."""
        self.plan = run.plan
        labels = [
            PhaseLabel(phase.split, phase.epoch, phase.steps, phase.is_train)
            for phase in run.plan.phases
        ]
        self._trace.begin(labels, run.world.rank)

    def on_load(self, run: Run) -> None:
        """Record the restored state."""
        self._trace.keep_restored(_find_position(run), digest_state(run.task.stateful()))

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Forget the batches of a step that was not completed."""
        self._trace.drop_step()

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Record a micro-batch, after other hooks have changed it."""
        self._trace.record_batch(batch)

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the output of the model, and the generators that it has drawn from."""
        # Here and not in `on_step`: between two steps, a loader without workers draws as well.
        self._trace.record_output(out.output)
        self._trace.record_generators()

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the gradients up to this micro-batch."""
        self._trace.record_gradients(run.task.parts.model)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Record the loss and states after a step."""
        self._trace.record("loss", out.loss)
        self._trace.record("logs", out.logs)
        self._end_step(run)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Record metrics and states after a phase."""
        self._trace.record("metrics", dict(metrics))
        self._end_step(run)

    def on_end(self, run: Run) -> None:
        """Record the states at the end."""
        self._end_step(run)

    def _end_step(self, run: Run) -> None:
        self._trace.record_state(run.task.stateful())
        self._trace.record("hooks", _collect_hook_states(run))
        self._trace.end_step(_find_position(run))


def _find_position(run: Run) -> StepPosition:
    return run.state.phase, run.state.step


def _collect_hook_states(run: Run) -> dict[str, Any]:
    """Return the states of custom hooks."""
    # Built-in hooks store offsets in log files, which differ between otherwise equal runs.
    custom = {
        label: hook.state_dict()
        for label, hook in run.hooks.by_label.items()
        if not type(hook).__module__.startswith("phasetrain.")
    }
    return {label: state for label, state in custom.items() if state}
