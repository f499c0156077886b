"""Examine an update that was skipped because it was not finite: find the first such operation in
forward and backward pass."""

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.commands.setup import Setup
from phasetrain.distributed import Ordered, Strategy, World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import ChangedError, ConfigError, InvalidCheckpointError, NumericsError
from phasetrain.hooks.ledger_content import find_tensors
from phasetrain.hooks.numerics import StepDump, read_dump
from phasetrain.optim import NonFinite
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import Machine
from phasetrain.runtime.storage import Storage
from phasetrain.tasks import Builder, SavedTask, Task

log = logging.getLogger(__name__)

SHOWN = 5
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
    builder = Builder(setup.config, machine, setup.world, setup.stages)
    data = builder.data()
    # fresh=False: the weights come from the dump, and MODEL.weights need not be there any more
    parts = builder.parts(data, builder.plan(data), fresh=False)
    # ordered reduction has numbers of its own for the shards of the global batch
    if len(dump.shares) > 1 and not isinstance(parts.strategy, Ordered):
        parts = replace(parts, strategy=_InTurn(setup.world, dump.shares))
    task = builder.task(parts)
    log.info("the update of %s: %s", folder, dump.found)
    with machine.apply_settings():
        seen = _run_watched(task, dump, folder)
        function = ""
        # only if the forward pass is finite: it is the cause otherwise, and anomaly mode is slow
        if not seen.outputs and not seen.made:
            function = _find_in_backward(task, dump, folder)
    then = dump.found.loss
    now = seen.loss
    equal = _compare_losses(then, now, is_reordered=len(dump.shares) > 1)
    same = equal != "DIFFERENT" and not seen.made
    rows = [
        ("loss", repr(then), repr(now), equal),
        ("samples with such inputs", "-", join_first(seen.inputs, SHOWN), ""),
        ("first module with such outputs", "-", next(iter(seen.outputs), "none"), ""),
        ("modules with such outputs after it", "-", join_first(seen.outputs[1:], SHOWN), ""),
        ("first gradient in backward", "-", next(iter(seen.gradients), "none"), ""),
        (
            "gradients",
            join_first(dump.found.gradients or (), SHOWN),
            join_first(seen.gradients, SHOWN),
            "",
        ),
        ("first operation in backward", "-", function or "not looked for", ""),
    ]
    setup.terminal.print_table(
        f"update {dump.found.updates}: non-finite values", ("", "kept", "replay", ""), rows
    )
    if not same:
        log.error(
            "the step is %s now; hooks, which do not take part in this, may have caused it",
            "finite" if seen.made else "not finite with another loss",
        )
    if same:
        return 0
    return 1


def _compare_losses(then: float, now: float, *, is_reordered: bool) -> str:
    """Return the verdict on two losses; reordered sums may differ by rounding."""
    if repr(then) == repr(now):  # as texts, because NaN is not equal to itself
        return "equal"
    if is_reordered and isclose(then, now, rel_tol=ROUNDING):
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
class _Seen:
    """The non-finite values in order of their occurrence; `made` if the update succeeded."""

    loss: float = 0.0
    inputs: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    made: bool = False
    _skipped: bool = False

    def on_batch(self, batch: Batch) -> Batch:
        """Check the input of each sample."""
        for tensor in find_tensors(batch.input):
            if tensor.is_floating_point() and tensor.ndim and len(tensor) == batch.size:
                bad = ~tensor.reshape(batch.size, -1).isfinite().all(dim=1)
                self.inputs += batch.ids[bad.cpu()].tolist()
        return batch

    def on_forward(self, out: StepOutput) -> StepOutput:
        """Do nothing: the guard reports the loss."""
        return out

    def on_backward(self, out: StepOutput) -> None:
        """Do nothing."""

    def on_update(self) -> None:
        """Record that the update was made."""
        self.made = not self._skipped

    def on_skip(self, batches: list[Batch], found: NonFinite) -> None:
        """Keep the loss of the update."""
        self.loss = found.loss
        self._skipped = True


def _run_watched(task: Task, dump: StepDump, folder: str) -> _Seen:
    """Run the step, and return its non-finite values."""
    _restore(task, dump, folder)
    seen = _Seen()
    with _watch_task(task, seen):
        _run_step(task, dump, seen)
    return seen


def _run_step(task: Task, dump: StepDump, seen: _Seen) -> None:
    device = task.parts.machine.device
    task.model.train()
    task.loss.train()
    try:
        out = task.train_step([batch.to(device) for batch in dump.batches], dump.position, seen)
        task.updater.resolve()
        if seen.made:
            seen.loss = float(out.loss)
    except NumericsError:
        pass


def _find_in_backward(task: Task, dump: StepDump, folder: str) -> str:
    """Return the operation whose gradient is the first with a NaN, and the line that called it."""
    # restored once more, because the first pass has changed buffers such as running statistics
    _restore(task, dump, folder)
    # torch puts the forward trace of the operation into a warning, not into the error
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                _run_step(task, dump, _Seen())
        except RuntimeError as error:
            name = re.search(r"Function '(\w+)' returned nan", str(error))
            if name is None:
                raise
            return f"{name[1]}{_find_line([str(one.message) for one in said])}"
    return "none with a NaN: an overflow to infinity"


def _find_line(messages: Sequence[str]) -> str:
    """Return the last line outside torch in the forward trace of torch's anomaly warning."""
    found = [
        (file, number)
        for text in messages
        for file, number in re.findall(r'File "([^"]+)", line (\d+)', text)
        if not file.startswith(_TORCH)
    ]
    if found:
        return f" of {found[-1][0]}, line {found[-1][1]}"
    return ""


def _restore(task: Task, dump: StepDump, folder: str) -> None:
    try:
        task.restore(SavedTask(dump.task))
    except ChangedError as error:
        raise ChangedError(f"{folder}: {error}", code=error.code) from error


@contextmanager
def _watch_task(task: Task, seen: _Seen) -> Iterator[None]:
    """Record modules with non-finite outputs and parameters with non-finite gradients."""
    modules = {"model": task.model, "loss": task.loss}
    handles: list[Any] = []
    for part, root in modules.items():
        for name, module in root.named_modules():
            handles.append(module.register_forward_hook(_Look(f"{part}.{name}".rstrip("."), seen)))
        for name, parameter in root.named_parameters():
            if parameter.requires_grad:
                look = _watch_gradient(f"{part}.{name}", seen)
                handles.append(parameter.register_hook(look))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        # The same task runs the step once more in anomaly mode, which must not be recorded again.
        for handle in handles:
            handle.remove()


@dataclass
class _Look:
    """A forward hook that records whether the output of a module is not finite, and its input."""

    name: str
    seen: _Seen

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_finite(output):
            return
        kind = type(module).__name__
        given = "finite" if _is_finite(args) else "not finite"
        if not any(line.startswith(f"{self.name} ") for line in self.seen.outputs):
            self.seen.outputs.append(f"{self.name} ({kind}, its input is {given})")


def _watch_gradient(name: str, seen: _Seen) -> Any:
    def look(gradient: Tensor) -> None:
        if name not in seen.gradients and not _is_finite(gradient):
            seen.gradients.append(name)

    return look


def _is_finite(value: Any) -> bool:
    return all(
        bool(tensor.isfinite().all())
        for tensor in find_tensors(value)
        if tensor.is_floating_point()
    )
