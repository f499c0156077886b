"""Tensors on the emulated device, and how operators treat them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from emulated_cuda import rules
from emulated_cuda.device import CUDA, Device, current

CPU = torch.device("cpu")


class CudaTensor(Tensor):
    """A tensor on `cuda:0` with its values in memory of the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> "CudaTensor":
        return Tensor._make_subclass(
            cls,
            host,
            require_grad=False,
            dispatch_device=True,
            device_for_backend_keys=CUDA,  # type: ignore[call-arg]
        )

    @property
    def host(self) -> Tensor:
        """The values, as a tensor on the CPU that shares them."""
        # Not kept: an attribute would be state of the model for code that looks for it, and an
        # assignment to `.data` replaces the memory.
        return torch.empty(0, dtype=self.dtype).set_(
            self.untyped_storage(),  # type: ignore[call-overload]
            self.storage_offset(),
            self.shape,
            self.stride(),
        )

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run_operator(current(), func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.host!r})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def numpy(self, *, force: bool = False) -> Any:
        """Reject the conversion, as torch does."""
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def tolist(self) -> Any:
        """Return the values; the host waits for them."""
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that a stream uses the memory, too."""
        current().record_stream(self.host, stream)

    def __reduce_ex__(self, protocol: Any) -> Any:
        current().report("a pickled CUDA tensor is restored on the device of its sender")
        return _restore, (self.detach().cpu(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copied
        return copied


def _restore(host: Tensor, requires_grad: bool) -> Tensor:
    return host.to(CUDA).requires_grad_(requires_grad)


class EmulationMode(TorchDispatchMode):
    """Runs operators that have no tensor on the device as argument, such as factories."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # computes shapes only
        if any(kind not in (CudaTensor, Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # such as a distributed tensor, which computes with its shards
        return run_operator(current(), func, args, kwargs or {})


def run_operator(device: Device, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator as on CUDA."""
    if func is torch.ops.prim.device.default:
        return CUDA
    name = func.overloadpacket.__name__
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
    on_host = [leaf for leaf in leaves if not isinstance(leaf, CudaTensor)]
    if name == "is_pinned":
        return not on_device and device.is_pinned(args[0])
    if name in ("_pin_memory", "pin_memory"):
        return device.pin(args[0].clone())
    if name == "_to_copy":
        return _convert(device, func, args[0], dict(kwargs))
    if name == "copy_":
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return _copy(device, args[0], args[1], non_blocking=non_blocking)
    if not on_device and not is_cuda(kwargs.get("device")):
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return device.pin(func(*args, **{**kwargs, "pin_memory": False}))
    written = _list_written(func, args, kwargs)
    _check(device, name, args, kwargs, on_device, on_host, written)
    return _compute(device, func, args, dict(kwargs), on_device, written)


def _check(
    device: Device,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_device: Sequence[CudaTensor],
    on_host: Sequence[Tensor],
    written: Sequence[Tensor],
) -> None:
    """Reject what CUDA rejects, and record what waits for the device.

    Raises:
        RuntimeError: as on CUDA: mixed devices, or no deterministic kernel.
    """
    if on_device and on_host:
        mixed = rules.find_mixed(name, args, on_host, written)
        if mixed is not None:
            place = device.note("problem", name)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({name} gets a tensor of shape {tuple(mixed.shape)} on the CPU: "
                f"{place})"
            )
        if name in rules.INDEXING:
            device.note("wait", f"{name} with an index on the CPU")
            device.synchronize()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if is_deterministic and rules.NONDETERMINISTIC.get(name, lambda *_: False)(args, kwargs):
        place = device.note("problem", name)
        raise RuntimeError(
            f"{name} does not have a deterministic implementation, but you set "
            f"'torch.use_deterministic_algorithms(True)' ({place})"
        )
    repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in rules.READS or rules.has_boolean_index(name, args) or repeats:
        device.note("wait", name)
        device.synchronize()


def _compute(
    device: Device,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    on_device: Sequence[CudaTensor],
    written: Sequence[Tensor],
) -> Any:
    """Compute on the CPU, and put the results on the device unless CPU is asked for."""
    name = func.overloadpacket.__name__
    to_device = "device" not in kwargs or kwargs["device"] is None or is_cuda(kwargs["device"])
    if "device" in kwargs:
        kwargs["device"] = CPU
    kwargs.pop("pin_memory", None)
    is_collective = func.namespace == "c10d"
    has_kernel = not (is_collective or func.is_view or name in rules.NO_KERNEL)
    if is_collective:
        device.note("collective", name)
    elif has_kernel:
        device.note("kernel", name, rules.count_kernels(name, args))
    hosts = {id(tensor): tensor.host for tensor in on_device}
    host_args, host_kwargs = tree_map_only(
        CudaTensor, lambda tensor: hosts[id(tensor)], (tuple(args), kwargs)
    )
    run = _draw if torch.Tag.nondeterministic_seeded in func.tags else _call
    result = run(device, func, host_args, host_kwargs)
    known = {id(hosts[id(tensor)]): tensor for tensor in on_device}
    outputs = [hosts[id(tensor)] for tensor in written if id(tensor) in hosts]
    if any(host.shape != known[id(host)].shape for host in outputs):
        raise NotImplementedError("the emulation of CUDA knows no operators that resize")
    fresh: list[Tensor] = []
    moved = tree_map(partial(_put, known=known, fresh=fresh, to_device=to_device), result)
    if not func.is_view:
        for tensor in fresh:
            device.allocate(tensor)
        outputs += fresh
    if has_kernel or is_collective:
        device.launch(name, list(hosts.values()), outputs)
    return moved


def _put(value: Any, *, known: dict[int, CudaTensor], fresh: list[Tensor], to_device: bool) -> Any:
    """Return a result as a tensor on the device; results in new memory are added to `fresh`."""
    # A fake tensor computes shapes only.
    if type(value) not in (Tensor, torch.nn.Parameter):
        return value
    if id(value) in known:
        return known[id(value)]
    if not to_device:
        return value
    addresses = {tensor.untyped_storage().data_ptr() for tensor in known.values()}
    if value.untyped_storage().data_ptr() not in addresses:
        fresh.append(value)
    return CudaTensor(value)


def _call(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _draw(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator with the random numbers of the device."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(device.generator.get_state())
    try:
        return func(*args, **({**kwargs, "generator": None} if "generator" in kwargs else kwargs))
    finally:
        device.generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)
        device.offset += 4


def _convert(device: Device, func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run `_to_copy`, which may move between devices."""
    target = kwargs.pop("device", None)
    non_blocking = kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    is_here = isinstance(source, CudaTensor)
    to_device = is_here if target is None else is_cuda(target)
    host = source.host if isinstance(source, CudaTensor) else source
    result = func(host, **kwargs)
    if not to_device:
        if is_here:
            if non_blocking:
                device.pin(result)
            device.launch("_to_copy", [host], [])
            device.fetch(result, non_blocking=non_blocking)
        return result
    device.allocate(result)
    device.launch("_to_copy", [host] if is_here else [], [result])
    if is_here:
        device.note("kernel", "_to_copy")
    else:
        device.send(source, non_blocking=non_blocking)
    return CudaTensor(result)


def _copy(device: Device, target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
    """Run `copy_`, which may move between devices."""
    to_device, from_device = isinstance(target, CudaTensor), isinstance(source, CudaTensor)
    here = target.host if isinstance(target, CudaTensor) else target
    there = source.host if isinstance(source, CudaTensor) else source
    here.copy_(there)
    if to_device or from_device:
        memory = [here] if to_device else []
        device.launch("copy_", [*memory, *([there] if from_device else [])], memory)
    if to_device and from_device:
        device.note("kernel", "copy_")
    elif to_device:
        device.send(source, non_blocking=non_blocking)
    elif from_device:
        device.fetch(here, non_blocking=non_blocking)
    return target


def _list_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def is_cuda(device: Any) -> bool:
    """Return whether an argument `device` names the emulated device."""
    return device is not None and torch.device(device).type == "cuda"
