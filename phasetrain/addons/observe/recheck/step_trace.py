"""Losses, gradients and inputs of one computation of an update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phasetrain.addons.observe.recheck.findings import ChangedValue
from phasetrain.data import CustomLoader, PhaseLoader
from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.phases import Phase
from phasetrain.models.prepare import CompiledModel
from phasetrain.proof.compare import count_changed
from phasetrain.proof.digest import sum_bits
from phasetrain.runtime.machine import preserve_generators
from phasetrain.runtime.nested import list_tensors, map_tensors
from phasetrain.tasks import StepEvents, Task


class StepTrace(StepEvents):
    """Losses, gradients and gradient norms of one computation of an update on this rank.

    Gradients are summed up as bits when autograd has computed them, before ranks exchange them: a
    difference tells the rank on which it arose.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._gradients: dict[str, list[Tensor]] = {}
        self._norms: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def begin(self, task: Task) -> None:
        """Watch the gradients of the trained parameters."""
        if isinstance(task.parts.train_model, CompiledModel):
            # A hook on a parameter would make torch compile the model again, perhaps to other
            # kernels.
            return
        for label, updater in task.updaters.items():
            names = dict(enumerate(updater.names))
            for number, parameter in enumerate(updater.gradients.parameters):
                if parameter.requires_grad and parameter.is_leaf:
                    name = names.get(number, f"{label}.{number}")
                    handle = parameter.register_hook(  # type: ignore[no-untyped-call]
                        self._watch(name)
                    )
                    self._handles.append(handle)

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Keep the loss of a micro-batch."""
        self._losses.append(out.loss.detach().clone())
        return out

    def end(self, task: Task) -> None:
        """Stop watching, and keep the gradient norms."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for label, updater in task.updaters.items():
            norm = updater.gradients.norm
            if isinstance(norm, Tensor):
                self._norms[label] = norm.detach().clone()

    def compare(self, other: "StepTrace") -> list[ChangedValue]:
        """Return the differences to another computation of the same update."""
        differences = []
        losses = {str(number): loss for number, loss in enumerate(self._losses)}
        others = {str(number): loss for number, loss in enumerate(other._losses)}
        differences += _compare_values("loss", losses, others, "of micro-batch {}")
        sums = {name: torch.stack(values) for name, values in self._gradients.items()}
        other_sums = {name: torch.stack(values) for name, values in other._gradients.items()}
        differences += _compare_values("gradient", sums, other_sums, "of {}")
        differences += _compare_values("gradient norm", self._norms, other._norms, "of updater {}")
        return differences

    def _watch(self, name: str) -> Callable[[Tensor], None]:
        sums = self._gradients.setdefault(name, [])

        def add(gradient: Tensor) -> None:
            # Sparse gradients of embeddings have no entries to view.
            if gradient.layout is torch.strided:
                sums.append(sum_bits(gradient))

        return add


def _compare_values(
    component: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor], form: str
) -> list[ChangedValue]:
    return [
        ChangedValue(component, form.format(name))
        for name in {**one, **other}
        if name not in one or name not in other or count_changed(one[name], other[name])
    ]


def clone_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Return copies of micro-batches; a model may change its input in place."""
    return [
        replace(
            batch,
            input=map_tensors(batch.input, Tensor.clone),
            target=map_tensors(batch.target, Tensor.clone),
            mask=map_tensors(batch.mask, Tensor.clone),
            ids=batch.ids.clone(),
        )
        for batch in batches
    ]


def read_again(loader: PhaseLoader, phase: Phase, step: int) -> list[Batch] | None:
    """Return the micro-batches of a step, read in this process; None if they cannot be read twice.

    Args:
        loader: loader of the split.
        phase: phase of the step.
        step: number of the step in the phase, from 0.
    """
    if not isinstance(loader, PhaseLoader) or isinstance(loader, CustomLoader):
        return None
    if isinstance(loader.reader.dataset, ForwardDataset):
        return None  # samples that were read are gone
    draws = next(iter(loader.sampler.steps(phase, step)), None)
    if draws is None:
        return None
    with preserve_generators():
        return [loader.read(draw) for draw in draws]


def compare_batches(batches: Sequence[Batch], again: Sequence[Batch]) -> list[ChangedValue]:
    """Return the differences between the micro-batches of a step and the same, read again."""
    if any(batch.bad for batch in (*batches, *again)) or len(batches) != len(again):
        return []  # dropped samples have changed the batches after they were read
    for number, (one, other) in enumerate(zip(batches, again, strict=True)):
        if count_changed(one.ids, other.ids):
            return [ChangedValue("samples", f"of micro-batch {number}")]
        fields = (
            ("input", one.input, other.input),
            ("target", one.target, other.target),
            ("mask", one.mask, other.mask),
        )
        for name, value, other_value in fields:
            tensors, others = list_tensors(value), list_tensors(other_value)
            for tensor, second in zip(tensors, others, strict=False):
                if changed := count_changed(tensor, second):
                    return [ChangedValue("batch content", name, changed, tensor.numel())]
    return []
