"""Examine an update that was skipped because it was not finite: find the first such operation in
forward and backward pass."""

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.app.setup import Setup
from phasetrain.distributed import Ordered, Strategy, World
from phasetrain.engine.batch import Batch
from phasetrain.errors import ChangedError, ConfigError, InvalidCheckpointError, NumericsError
from phasetrain.hooks.numerics import StepDump, read_dump
from phasetrain.optim import NonFinite
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.nested import list_tensors
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import SavedTask, Task
from phasetrain.tasks.parts import StepEvents

log = logging.getLogger(__name__)

MAX_LISTED = 5
"""Maximum number of names and samples to print of each kind."""

ROUNDING = 1e-5
"""Relative tolerance of a loss that is summed in another order."""

_TORCH = str(Path(torch.__file__).parent)


def read_step_dump(storage: Storage, folder: str) -> StepDump:
    """Read the dump of a step that the hook `numerics` has written.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_dump(storage, folder)
    except InvalidCheckpointError as error:
        raise ConfigError(
            f"RUN.step: {error}; delete the folder to replay the update from a checkpoint"
        ) from error


def examine_dump(setup: Setup, dump: StepDump, folder: str, machine: Machine) -> int:
    """Repeat forward and backward pass of a dumped step with its batches and weights, and print the
    findings.

    The shards of several ranks are run one after the other, each with its own random state. Their
    gradients and losses are then added in another order, so that a finite loss may differ in its
    last bits.

    Args:
        setup: the resolved config.
        dump: the dump of the step.
        folder: its folder.
        machine: where to compute.

    Returns:
        The exit code: 0 if the step is not finite again, with the same loss; otherwise 1.

    Raises:
        ChangedError: the dump is of another model than the config describes.
    """
    builder = replace(setup, machine=machine).builder()
    data = builder.data()
    # fresh=False: the weights come from the dump, and MODEL.weights need not be there any more
    parts = builder.parts(data, builder.plan(data), fresh=False)
    # ordered reduction has numbers of its own for the shards of the global batch
    if len(dump.shares) > 1 and not isinstance(parts.strategy, Ordered):
        parts = replace(parts, strategy=_InTurn(setup.world, dump.shares))
    task = builder.task(parts)
    log.info("the update of %s: %s", folder, dump.found)
    with machine.apply_settings():
        seen = _NonFiniteValues()
        with _watch_task(task, seen):
            _run_step(task, dump, folder, seen)
        operation = "not looked for"
        # only if the forward pass is finite: it is the cause otherwise, and anomaly mode is slow
        if not seen.outputs and not seen.made:
            operation = _find_in_backward(task, dump, folder)
    before = dump.found.loss
    equal = _compare_losses(before, seen.loss, is_reordered=len(dump.shares) > 1)
    rows = [
        ("loss", repr(before), repr(seen.loss), equal),
        ("samples with such inputs", "-", join_first(seen.inputs, MAX_LISTED), ""),
        ("first module with such outputs", "-", next(iter(seen.outputs), "none"), ""),
        ("modules with such outputs after it", "-", join_first(seen.outputs[1:], MAX_LISTED), ""),
        ("first gradient in backward", "-", next(iter(seen.gradients), "none"), ""),
        (
            "gradients",
            join_first(dump.found.gradients or (), MAX_LISTED),
            join_first(seen.gradients, MAX_LISTED),
            "",
        ),
        ("first operation in backward", "-", operation, ""),
    ]
    setup.terminal.print_table(
        f"update {dump.found.updates}: non-finite values", ("", "kept", "replay", ""), rows
    )
    if equal != "DIFFERENT" and not seen.made:
        return 0
    log.error(
        "the step is %s now; hooks, which are not called in this replay, may be the reason",
        "finite" if seen.made else "not finite with another loss",
    )
    return 1


def _compare_losses(before: float, now: float, *, is_reordered: bool) -> str:
    """Return the verdict on two losses; reordered sums may differ by rounding."""
    if repr(before) == repr(now):  # as texts, because NaN is not equal to itself
        return "equal"
    if is_reordered and isclose(before, now, rel_tol=ROUNDING):
        return "equal to rounding"
    return "DIFFERENT"


class _InTurn(Strategy):
    """Runs the micro-batches of several ranks one after the other, each with its random state."""

    def __init__(self, world: World, shares: Sequence[int]) -> None:
        super().__init__(world)
        self._places = [
            (rank, micro) for rank, count in enumerate(shares) for micro in range(count)
        ]

    def place(self, micro: int) -> tuple[int, int]:
        """Return the rank of a micro-batch, and its index on that rank."""
        return self._places[micro]


@dataclass
class _NonFiniteValues(StepEvents):
    """The non-finite values in order of their occurrence; `made` if the update succeeded."""

    loss: float = 0.0
    inputs: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    made: bool = False
    _skipped: bool = False

    def on_batch(self, batch: Batch) -> Batch:
        """Check the input of each sample."""
        for tensor in list_tensors(batch.input):
            if tensor.is_floating_point() and tensor.ndim and len(tensor) == batch.size:
                bad = ~tensor.reshape(batch.size, -1).isfinite().all(dim=1)
                self.inputs += batch.ids[bad.cpu()].tolist()
        return batch

    def on_update(self) -> None:
        """Record that the update was made."""
        self.made = not self._skipped

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Keep the loss of the update."""
        self.loss = found.loss
        self._skipped = True


def _run_step(task: Task, dump: StepDump, folder: str, seen: _NonFiniteValues) -> None:
    """Restore the weights before the step, and run it."""
    try:
        task.restore(SavedTask(dump.task))
    except ChangedError as error:
        raise ChangedError(f"{folder}: {error}", code=error.code) from error
    device = task.parts.machine.device
    task.model.train()
    task.loss.train()
    try:
        out = task.run_step([batch.to(device) for batch in dump.batches], dump.position, seen)
        task.updater.resolve()
        if seen.made:
            seen.loss = float(out.loss)
    # Expected: the dump is of an update that was not finite, and `seen` has what was found.
    except NumericsError:
        pass


def _find_in_backward(task: Task, dump: StepDump, folder: str) -> str:
    """Return the operation whose gradient is the first with a NaN, and the line that called it."""
    # torch puts the forward trace of the operation into a warning, not into the error
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                _run_step(task, dump, folder, _NonFiniteValues())
        except RuntimeError as error:
            name = re.search(r"Function '(\w+)' returned nan", str(error))
            if name is None:
                raise
            return f"{name[1]}{_find_line([str(warning.message) for warning in said])}"
    return "none with a NaN: an overflow to infinity"


def _find_line(messages: Sequence[str]) -> str:
    """Return the last line outside torch in the forward trace of torch's anomaly warning."""
    calls = [
        (file, number)
        for text in messages
        for file, number in re.findall(r'File "([^"]+)", line (\d+)', text)
        if not file.startswith(_TORCH)
    ]
    if calls:
        return f" of {calls[-1][0]}, line {calls[-1][1]}"
    return ""


@contextmanager
def _watch_task(task: Task, seen: _NonFiniteValues) -> Iterator[None]:
    """Record modules with non-finite outputs and parameters with non-finite gradients."""
    modules = {"model": task.model, "loss": task.loss}
    handles: list[Any] = []
    for part, root in modules.items():
        for name, module in root.named_modules():
            record = partial(_record_output, seen, f"{part}.{name}".rstrip("."))
            handles.append(module.register_forward_hook(record))
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                record = partial(_record_gradient, seen, f"{part}.{name}")
                handles.append(parameter.register_hook(record))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        # The same task runs the step once more in anomaly mode, which must not be recorded again.
        for handle in handles:
            handle.remove()


def _record_output(
    seen: _NonFiniteValues, name: str, module: nn.Module, args: Any, output: Any
) -> None:
    """Record a module whose output is not finite, and whether its input was."""
    if _is_finite(output) or any(line.startswith(f"{name} ") for line in seen.outputs):
        return
    input_state = "finite" if _is_finite(args) else "not finite"
    seen.outputs.append(f"{name} ({type(module).__name__}, its input is {input_state})")


def _record_gradient(seen: _NonFiniteValues, name: str, gradient: Tensor) -> None:
    if name not in seen.gradients and not _is_finite(gradient):
        seen.gradients.append(name)


def _is_finite(value: Any) -> bool:
    return all(
        bool(tensor.isfinite().all())
        for tensor in list_tensors(value)
        if tensor.is_floating_point()
    )
