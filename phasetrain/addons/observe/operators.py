"""Modes that report each operator or torch function while they are active."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Record = Callable[[Any, Sequence[Any], Any], None]
"""Takes an operator or function, its positional arguments, and its result."""


class _Recording:
    """A mode that calls an operator unchanged and then reports it.

    Args:
        record: is called after each operator.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def _call(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._record(func, args, result)
        return result


class OperatorMode(_Recording, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the operators that reach the dispatcher."""

    __torch_dispatch__ = _Recording._call


class FunctionMode(_Recording, TorchFunctionMode):
    """Reports torch functions and methods of tensors, such as `Tensor.cpu`, which is no operator on
    the CPU."""

    __torch_function__ = _Recording._call
