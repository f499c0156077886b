"""Checks that train steps do not wait for the device."""

import io
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import phasetrain
from phasetrain.addons.observe import operators
from phasetrain.addons.observe.operators import FunctionMode, OperatorMode
from phasetrain.engine.loop import PhaseEngine
from phasetrain.runtime.terminal import Terminal

UPDATES = 5
"""Number of updates; all but the first are watched."""

READS = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operators whose result, or its shape, depends on values on the device."""

COPIES = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist})
"""Methods that copy a tensor to the host."""

PACKAGE = Path(phasetrain.__file__).parent
TORCH = Path(torch.__file__).parent
ALLOWED = (str(PACKAGE / "optim"), str(PACKAGE / "hooks"), str(PACKAGE / "checkpoint"))
"""Code that is documented to read values: some optimizers and scalers, and hooks at log points."""

WATCHING = (__file__, operators.__file__)
"""Files whose frames are between an operator and the code that calls it."""

STEP = frozenset({"run_step", "on_step"})
"""Functions that make up a train step."""


def assert_no_device_sync(overrides: Sequence[str], *, config_dir: str | None = None) -> None:
    """Assert that no train step and no hook's `on_step` reads a value from the device.

    Five updates are run; the first is not watched, since one-time checks are allowed. Operators
    that read values are caught when they are dispatched, also on the CPU; on CUDA, torch's own
    synchronization warnings count as well. A hook may read values less often than every five
    updates. Reads by the framework's log points, optimizers and scalers are allowed.

    Args:
        overrides: describe the run; its length and its folder do not matter.
        config_dir: folder with custom configs.

    Raises:
        AssertionError: a value is read; names file, line, operator and number of times.

    Example:
        >>> assert_no_device_sync(["experiment=digits", "HOOKS.mine={name: my_parts.Mine}"])
    """
    words = [*overrides, "PHASES.epochs=null", "PHASES.samples=null", f"PHASES.updates={UPDATES}"]
    words += ["PHASES.limit.train=null", "PHASES.limit.test=1", "PHASES.test_every.epochs=null"]
    words += ["RUN.engine=train", "CHECKPOINT.every_updates=null", "CHECKPOINT.every_epochs=null"]
    words += ["RUN.exact=false"]  # nothing resumes this run
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        phasetrain.run(
            [*words, f"RUN.dir={folder}/run"],
            config_dir=config_dir,
            loop=watch.loop,
            terminal=Terminal(io.StringIO(), live=False),
        )
    if watch.reads:
        lines = [
            f"{reader} ({operator}), {times} times"
            for (reader, operator), times in watch.reads.items()
        ]
        raise AssertionError(
            f"in {UPDATES - 1} updates values were read from the device: {'; '.join(lines)}. Each "
            "read makes the step wait for the device; keep the tensor (`.detach()`), sum it up in "
            "a buffer, and read it when a phase ends or once in many updates "
            "(`@on('step', every=100)`)"
        )


class _Watch:
    """Finds reads of values during the train steps of an engine.

    Attributes:
        reads: (file:line, operator) -> times.
    """

    def __init__(self) -> None:
        self.reads: dict[tuple[str, str], int] = {}
        self._engine: PhaseEngine | None = None
        self._watching = False
        self._on_host: set[int] = set()

    def loop(self, engine: PhaseEngine) -> None:
        """Run the engine and watch it."""
        self._engine = engine
        with ExitStack() as stack:
            stack.enter_context(OperatorMode(self.record_operator))
            # Tensor.cpu and the like are no operators on the CPU, so they never reach the
            # dispatcher.
            stack.enter_context(FunctionMode(self.record_function))
            if engine.task.parts.machine.device.type == "cuda":
                stack.enter_context(_catch_sync_warnings(self))
            # PhaseEngine.run, written out to skip the first update and to know each batch.
            for number, batches in enumerate(engine.steps()):
                self._watching = number > 0
                self._on_host = {_memory_address(batch.ids) for batch in batches}
                engine.finish(engine.compute(batches))

    def record_operator(self, func: Any, args: Sequence[Any], result: object) -> None:
        """Record an operator if it reads values."""
        name = func.overloadpacket.__name__
        if name in READS or (name == "index" and _selects_by_value(args[1])):
            self.record_read(f"aten::{name}", args[0])

    def record_function(self, func: Any, args: Sequence[Any], result: object) -> None:
        """Record a method that copies a tensor to the host."""
        if func in COPIES:
            self.record_read(f"Tensor.{func.__name__}", args[0])

    def record_read(self, operator: str, tensor: object = None) -> None:
        """Record that a value is read, if that is in a watched step and by code that may not."""
        assert self._engine is not None
        state = self._engine.state
        plan = self._engine.plan
        training = state.phase < len(plan.phases) and plan.phases[state.phase].is_train
        if (
            not self._watching
            or not training
            # Ids of samples stay on the host.
            or (isinstance(tensor, Tensor) and _memory_address(tensor) in self._on_host)
        ):
            return
        reader = _find_reader(sys._getframe(1))
        if reader:
            self.reads[reader, operator] = self.reads.get((reader, operator), 0) + 1


@contextmanager
def _catch_sync_warnings(watch: _Watch) -> Iterator[None]:
    """Record torch's warnings about CUDA synchronization as reads."""

    def note(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message):
            watch.record_read("synchronisation")

    # Needed in addition to the dispatch mode: CUDA kernels may synchronize inside an operator
    # whose result does not depend on values.
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # by default, a repeated warning is shown once
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _selects_by_value(indices: Sequence[Tensor | None]) -> bool:
    # A boolean index is a hidden nonzero().
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _find_reader(frame: FrameType | None) -> str | None:
    """Return file and line of the reading code, or None if it may, or if no step is running."""
    reader = None
    in_step = False
    while frame is not None:
        name = frame.f_code.co_filename
        if reader is None and not name.startswith(str(TORCH)) and name not in WATCHING:
            if name.startswith(ALLOWED):
                return None
            reader = f"{name}:{frame.f_lineno}"
        in_step = in_step or (frame.f_code.co_name in STEP and name not in WATCHING)
        frame = frame.f_back
    if in_step:
        return reader
    return None


def _memory_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
