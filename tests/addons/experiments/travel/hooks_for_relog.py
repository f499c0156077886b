"""Hooks that log numbers, for runs with them and for `phasetrain relog`."""

from collections.abc import Mapping
from typing import Any

import torch

import phasetrain
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.hooks.metrics import record_line, record_position


class Observer(Hook):
    """Base of hooks that only look."""

    observe_only = True


class Norms(Observer):
    """Logs the norm of the head, of its gradient, and of the input."""

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        phasetrain.log("input_norm", batch.input.norm())

    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        phasetrain.log("head_gradient", run.task.parts.model.head.weight.grad.norm())

    def on_update(self, run: Run, phase: Phase) -> None:
        phasetrain.log("head", run.task.parts.model.head.weight.norm().item())


class Phases(Observer):
    """Adds a metric to every phase."""

    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        weights = [weight.detach().double().sum() for weight in run.task.parts.model.parameters()]
        metrics["weights"] = float(sum(weights))


class Outputs(Observer):
    """Logs a number of some passes only, tests included."""

    def on_output(self, run: Run, phase: Phase, batch: Batch, output: Any) -> None:
        if run.state.updates % 2:
            phasetrain.log("largest", output.detach().max())


class Lines(Observer):
    """Writes lines of its own kind."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.is_train:
            position = record_position(run, phase, run.state.step)
            record_line(run, {"kind": "mine", **position, "twice": 2 * float(out.loss)})


class Draws(Observer):
    """Logs a random number, which the run has seeded."""

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        record_line(
            run, {"kind": "drawn", "updates": run.state.updates, "at": torch.rand(()).item()}
        )


class Running(Observer):
    """Keeps a mean over updates, which a segment in the middle does not have."""

    def __init__(self) -> None:
        self.mean = 0.0

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.is_train:
            self.mean = 0.9 * self.mean + 0.1 * float(out.loss.detach())
            phasetrain.log("running", self.mean)


class PerPhase(Observer):
    """Keeps a sum that it resets after each phase."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        self.total += float(out.loss.detach())

    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        metrics["total"] = self.total
        self.total = 0.0


class Disturbs(Observer):
    """Claims to observe and changes the training from update 6 on."""

    def on_update(self, run: Run, phase: Phase) -> None:
        if run.state.updates == 6:
            with torch.no_grad():
                run.task.parts.model.head.weight.mul_(1.01)


class Net(torch.nn.Module):
    """A model that logs since its code was changed."""

    logs = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        if self.logs:
            phasetrain.log("brightness", x.mean())
        return self.layer(x.flatten(1))


class Silent(Observer):
    """Logs a number under a name of the run."""

    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        metrics["loss"] = 0.0


class Fails(Observer):
    """Fails at an update."""

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        raise RuntimeError("no")


STATELESS = (Norms, Phases, Outputs, Lines, Draws)
STATEFUL = (Running, PerPhase)
