"""Replaces `torch.cuda` while the emulation lasts."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from emulated_cuda.backend import registered_backend, why_unsupported
from emulated_cuda.device import CUDA, Device, Stream, activate, current, merge
from emulated_cuda.tensor import CudaTensor, EmulationMode

NAME = "Emulated CUDA device"
MEMORY = 16 << 30
why_not_emulated = why_unsupported


class EmulatedStream(Stream):
    """`torch.cuda.Stream`."""

    device = CUDA
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        state = current()
        super().__init__(len(state.streams))
        state.streams[self.number] = self

    def wait_stream(self, other: Stream) -> None:
        """Let later operators wait for all of another stream so far."""
        merge(self.clock, other.clock)

    def wait_event(self, event: "Event") -> None:
        """Let later operators wait for an event."""
        merge(self.clock, event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        state = current()
        state.note("wait", "Stream.synchronize")
        state.synchronize(self.clock)

    def query(self) -> bool:
        """Return whether the stream is idle."""
        return True


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Note what the stream has to do so far."""
        self.clock = dict((stream or current().stream).clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Let later operators of a stream wait for the event."""
        merge((stream or current().stream).clock, self.clock)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        state = current()
        state.note("wait", "Event.synchronize")
        state.synchronize(self.clock)

    def query(self) -> bool:
        """Return whether the event has happened."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """Return milliseconds."""
        return 1.0


class Generator:
    """A default generator of `torch.cuda`."""

    device = CUDA

    def manual_seed(self, seed: int) -> "Generator":
        """Seed the device."""
        current().generator.manual_seed(seed)
        current().offset = 0
        return self

    def get_offset(self) -> int:
        """Return how many random numbers were drawn since the seed."""
        return current().offset

    def get_state(self) -> Tensor:
        """Return the state."""
        return current().generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """Restore a state."""
        current().generator.set_state(state)

    def initial_seed(self) -> int:
        """Return the seed."""
        return current().generator.initial_seed()


@contextmanager
def emulate_cuda(*, is_strict: bool = False) -> Iterator[Device]:
    """Give this process an emulated CUDA device.

    Args:
        is_strict: raise races and pickled tensors where they happen.

    Raises:
        AssertionError: on exit, races and pickled tensors, with their lines.
    """
    device = Device(is_strict=is_strict)
    device.default_stream = device.stream = object.__new__(EmulatedStream)
    Stream.__init__(device.stream)
    device.streams = {0: device.stream}
    with ExitStack() as stack:
        stack.enter_context(activate(device))
        stack.enter_context(registered_backend())
        # The device has no thread of its own.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for target, name, value in _replacements(device):
            stack.enter_context(patch.object(target, name, value))
        foreach = optimizers._foreach_supported_types
        foreach.append(CudaTensor)
        stack.callback(foreach.remove, CudaTensor)
        stack.enter_context(EmulationMode())
        yield device
    assert not device.problems, "\n".join(device.problems)


def _replacements(state: Device) -> list[tuple[Any, str, Any]]:
    """Return what is replaced: object, name of its attribute, and value."""
    generator = Generator()
    properties = SimpleNamespace(
        name=NAME,
        total_memory=MEMORY,
        major=8,
        minor=0,
        multi_processor_count=1,
        uuid=f"emulated-{os.environ.get('LOCAL_RANK', 0)}",
    )

    def synchronize(device: Any = None) -> None:
        state.note("wait", "torch.cuda.synchronize")
        state.synchronize()

    def pin_memory(tensor: Tensor, _: Any = None) -> Tensor:
        return state.pin(tensor.detach().clone())

    def is_pinned(tensor: Tensor, _: Any = None) -> bool:
        return not isinstance(tensor, CudaTensor) and state.is_pinned(tensor)

    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "synchronize": synchronize,
        "Stream": EmulatedStream,
        "Event": Event,
        "stream": state.on_stream,
        "current_stream": lambda device=None: state.stream,
        "default_stream": lambda device=None: state.default_stream,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 0),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 1 << 20,
        "memory_reserved": lambda device=None: 1 << 20,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "max_memory_reserved": lambda device=None: 1 << 20,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "is_bf16_supported": lambda *_: True,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, _=None: generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "default_generators": (generator,),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
        "utilization": lambda device=None: 0,
        "is_current_stream_capturing": lambda: False,
    }
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "set_device_index": lambda _: None,
        "device_count": lambda: 1,
    }
    replaced = [(torch.cuda, name, value) for name, value in cuda.items()]
    replaced += [(torch.accelerator, name, value) for name, value in accelerator.items()]
    replaced += [(Tensor, "pin_memory", pin_memory), (Tensor, "is_pinned", is_pinned)]
    replaced += [(nn.Module, "_apply", _keep_parameters(nn.Module._apply))]
    if dist.is_available():
        replaced += [(dist, "init_process_group", partial(_init_gloo, dist.init_process_group))]
        # It times backward passes with CUDA events in C++.
        replaced += [(dist.Logger, "set_runtime_stats_and_log", lambda _: None)]
    return replaced


def _init_gloo(original: Any, backend: str, **options: Any) -> None:
    """Join a process group; NCCL needs a device, so gloo serves it."""
    original((backend or "gloo").replace("nccl", "gloo"), **options)


def _keep_parameters(apply: Any) -> Any:
    """Return a method that moves a module and keeps its parameters the same objects."""

    # torch does so for each move between real devices, by an assignment to `.data`. It does not
    # accept a tensor of another class there, but can swap the contents of two tensors.
    def move(module: nn.Module, function: Any, recurse: bool = True) -> Any:
        future = torch.__future__
        before = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, function, recurse)
        finally:
            future.set_swap_module_params_on_conversion(before)

    return move
