"""Hooks for benchmarks/time_travel.py."""

from collections.abc import Mapping
from typing import Any

import torch

import phasetrain
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.hooks.metrics import record_line
from phasetrain.runtime.nested import list_tensors


class Observer(Hook):
    """Base of hooks that only look."""

    observe_only = True


class InputMean(Observer):
    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        phasetrain.log("input_mean", list_tensors(batch.input)[0].double().mean())


class TargetMean(Observer):
    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        phasetrain.log("target_mean", list_tensors(batch.target)[0].float().mean())


class Largest(Observer):
    def on_output(self, run: Run, phase: Phase, batch: Batch, output: Any) -> None:
        phasetrain.log("largest", list_tensors(output)[0].detach().max())


class SomePasses(Observer):
    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if run.state.updates % 3 == 1:
            phasetrain.log("some", float(out.loss.detach()) ** 2)


class GradientNorm(Observer):
    def on_backward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        grads = [p.grad for p in run.task.parts.model.parameters() if p.grad is not None]
        phasetrain.log("gradients", torch.nn.utils.get_total_norm(grads))


class WeightNorm(Observer):
    def on_update(self, run: Run, phase: Phase) -> None:
        weights = [p.detach() for p in run.task.parts.model.parameters()]
        phasetrain.log("weight_norm", torch.nn.utils.get_total_norm(weights))


class PhaseMetric(Observer):
    def on_metrics(self, run: Run, phase: Phase, metrics: dict[str, float]) -> None:
        weight = next(run.task.parts.model.parameters()).detach()
        metrics["first_weight"] = float(weight.flatten()[0])


class Drawn(Observer):
    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        position = {"updates": run.state.updates, "phase": phase.index}
        record_line(run, {"kind": "drawn", **position, "at": torch.rand(()).item()})


class RunningMean(Observer):
    def __init__(self) -> None:
        self.mean = 0.0

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.is_train:
            self.mean += 0.1 * (float(out.loss.detach()) - self.mean)
            phasetrain.log("running_mean", self.mean)


class PhaseSum(Observer):
    def __init__(self) -> None:
        self.total = 0.0

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        self.total += float(out.loss)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        position = {"updates": run.state.updates, "phase": phase.index}
        record_line(run, {"kind": "phase_sum", **position, "sum": self.total})
        self.total = 0.0


STATELESS = (
    InputMean,
    TargetMean,
    Largest,
    SomePasses,
    GradientNorm,
    WeightNorm,
    PhaseMetric,
    Drawn,
)
STATEFUL = (RunningMean, PhaseSum)
HOOKS = (*STATELESS, *STATEFUL)
