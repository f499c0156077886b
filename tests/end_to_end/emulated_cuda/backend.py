"""Registers a CUDA backend with a torch that was built without one.

Autograd asks two C++ objects about a device: its guard, which knows streams, and the hooks of CUDA.
A CPU build has no guard for CUDA, and its hooks say that there is no device. Here torch installs
the guard that does nothing, which it has for fake tensors, and the table of virtual functions of
the hooks is replaced by a copy that knows one device. A compiled library could do the same, but
only if it were loaded before torch.
"""

import ctypes
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LIBRARIES = Path(torch.__file__).parent / "lib"
HEADERS = Path(torch.__file__).parent / "include"
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
HOOKS = "_ZN2at6detail12getCUDAHooksEv"

CUDA = 1
"""Number of the device type in torch."""

GUARD_SLOTS = 40
HOOK_SLOTS = 80
"""More virtual functions than the classes have."""

_HEAD = 2
"""Words before the first function in a table of virtual functions (Itanium C++ ABI)."""


def why_unsupported() -> str | None:
    """Return why the backend cannot be registered here; None: it can."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "torch was built with CUDA"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "the emulation of CUDA knows the C++ ABI of Linux only"
    return None


@contextmanager
def registered_backend() -> Iterator[None]:
    """Let autograd accept tensors on one CUDA device, and forget it on exit."""
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(
        ctypes.CDLL(str(LIBRARIES / "libc10.so")), GUARDS
    )
    before = guards[CUDA]
    # Torch installs the guard only if there is another one without devices.
    none = _function(ctypes.c_int8, 0)
    table = (ctypes.c_void_p * GUARD_SLOTS)(*[_address(none)] * GUARD_SLOTS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    guards[CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    try:
        with _available_hooks():
            yield
    finally:
        guards[CUDA] = before


@contextmanager
def _available_hooks() -> Iterator[None]:
    """Let the hooks of CUDA say that there is one device."""
    get_hooks = ctypes.CDLL(str(LIBRARIES / "libtorch_cpu.so"))[HOOKS]
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    before = hooks[0]
    slots = _hook_slots()
    table = (ctypes.c_void_p * HOOK_SLOTS).from_address(before - _HEAD * 8)
    copy = (ctypes.c_void_p * HOOK_SLOTS)(*table)
    yes, one = _function(ctypes.c_bool, value=True), _function(ctypes.c_int8, 1)
    first, same = _function(ctypes.c_int8, 0), _function(ctypes.c_int8, 0, ctypes.c_int8)
    answers = dict.fromkeys(("isBuilt", "isAvailable", "init", "hasCUDA"), yes)
    answers |= {"hasPrimaryContext": _function(ctypes.c_bool, True, ctypes.c_int8)}
    answers |= {"deviceCount": one, "getCurrentDevice": first}
    answers |= dict.fromkeys(("setCurrentDevice", "exchangeDevice", "maybeExchangeDevice"), same)
    for name, function in answers.items():
        if name in slots:  # older versions of torch have fewer
            copy[_HEAD + slots[name]] = _address(function)
    hooks[0] = ctypes.addressof(copy) + _HEAD * 8
    try:
        yield
    finally:
        hooks[0] = before


def _hook_slots() -> dict[str, int]:
    """Return the places of the virtual functions of torch's hooks, from its headers."""
    header = (HEADERS / "ATen" / "detail" / "AcceleratorHooksInterface.h").read_text("utf-8")
    slots: dict[str, int] = {}
    count = 0
    for name in re.findall(r"^  virtual [^;{]*?(~?\w+)\(", header, re.MULTILINE):
        slots[name] = count
        count += 2 if name.startswith("~") else 1  # a destructor has two
    slots["hasCUDA"] = count  # the first function that the base class does not have
    return slots


def _function(result: Any, value: Any, *arguments: Any) -> Any:
    """Return a C function with these arguments, after `this`, that returns the value."""
    return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(lambda *_: value)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
