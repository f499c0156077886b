"""Whether a step waits for the device."""

import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import phasetrain
from phasetrain.engine.loop import PhaseEngine
from phasetrain.testing.kills import run_quietly

UPDATES = 5
"""Updates that are made; all but the first are watched."""

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
"""Operators whose result, or the shape of it, depends on values that lie on the device."""

COPIES = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist})
"""Methods that bring a tensor to the host."""

PACKAGE = Path(phasetrain.__file__).parent
TORCH = Path(torch.__file__).parent
ALLOWED = (str(PACKAGE / "optim"), str(PACKAGE / "hooks"), str(PACKAGE / "checkpoint"))
"""Where the framework itself reads, and says so: optimizers and scalers without a path on the
device, log points."""

STEP = frozenset({"train_step", "on_step"})
"""Functions of which a step of the hot path is made."""


def assert_no_device_sync(overrides: Sequence[str], *, config_dir: str | None = None) -> None:
    """See that no train step, nor a hook's `on_step`, reads a value from the device, for which it
    would have to wait.

    Five updates are run; the first is not watched, so that what is looked at only once may be. On
    the CPU operators that read values are caught as they are dispatched; on CUDA, torch's own
    warnings of synchronisation count as well. A hook may read every so many updates, if that is
    less often than every five. What the framework documents is let pass: its log points, and
    optimizers and scalers that cannot do without.

    Args:
        overrides: describe the run; its length and its folder do not matter.
        config_dir: a folder with configs of your own.

    Raises:
        AssertionError: something reads; it names file, line and operator, and how often.

    Example:
        >>> assert_no_device_sync(["experiment=digits", "HOOKS.mine={name: my_parts.Mine}"])
    """
    words = [*overrides, "PHASES.epochs=null", "PHASES.samples=null", f"PHASES.updates={UPDATES}"]
    words += ["PHASES.limit.train=null", "PHASES.limit.test=1", "PHASES.test_every.epochs=null"]
    words += ["RUN.engine=train", "CHECKPOINT.every_updates=null", "CHECKPOINT.every_epochs=null"]
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        run_quietly([*words, f"RUN.dir={folder}/run"], config_dir=config_dir, loop=watch.loop)
    if watch.found:
        lines = [
            f"{place} ({operator}), {times} times"
            for (place, operator), times in watch.found.items()
        ]
        raise AssertionError(
            f"in {UPDATES - 1} updates values were read from the device: {'; '.join(lines)}. Each read makes the step "
            "wait for the device; keep the tensor (`.detach()`), add it up in a buffer, and read it when a phase ends "
            "or once in many updates (`@on('step', every=100)`)"
        )


class _Watch:
    """Finds reads of values during the train steps of an engine.

    Attributes:
        found: (file:line, operator) -> times.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], int] = {}
        self._engine: PhaseEngine | None = None
        self._watching = False
        self._on_host: set[int] = set()

    def loop(self, engine: PhaseEngine) -> None:
        """Run the engine and watch it."""
        self._engine = engine
        with ExitStack() as stack:
            stack.enter_context(_Dispatched(self))
            stack.enter_context(_Called(self))
            if engine.task.parts.machine.device.type == "cuda":
                stack.enter_context(_synchronisations_warned(self))
            for number, batches in enumerate(engine.steps()):
                self._watching = number > 0
                self._on_host = {_memory(batch.ids) for batch in batches}
                engine.finish(engine.task.train_step(batches, engine.position(), engine.events()))

    def read(self, operator: str, tensor: object = None) -> None:
        """Note that a value was read, if it was in a step that is watched and by code that is not
        allowed to."""
        assert self._engine is not None
        state = self._engine.state
        plan = self._engine.plan
        training = state.phase < len(plan.phases) and plan.phases[state.phase].is_train
        if (
            not self._watching
            or not training
            or (isinstance(tensor, Tensor) and _memory(tensor) in self._on_host)
        ):
            return
        place = _reader(sys._getframe(1))
        if place:
            self.found[place, operator] = self.found.get((place, operator), 0) + 1


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name == "index" and _selects_by_value(args[1])):
            self._watch.read(f"aten::{name}", args[0])
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in COPIES:
            self._watch.read(f"Tensor.{func.__name__}", args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _synchronisations_warned(watch: _Watch) -> Iterator[None]:
    """Take torch's warnings of synchronisation with CUDA as reads."""

    def note(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if "synchroniz" in str(message):
            watch.read("synchronisation")

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _selects_by_value(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _reader(frame: FrameType | None) -> str | None:
    """Return file and line of the code that reads, or None where it may, or where no step is under
    way."""
    place = None
    in_step = False
    while frame is not None:
        name = frame.f_code.co_filename
        if place is None and not name.startswith(str(TORCH)) and name != __file__:
            if name.startswith(ALLOWED):
                return None
            place = f"{name}:{frame.f_lineno}"
        in_step = in_step or (frame.f_code.co_name in STEP and name != __file__)
        frame = frame.f_back
    if in_step:
        return place
    return None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
