"""torch's optimizers without the import of torch's compiler, which takes as long as the import of
torch."""

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"


def defer_compiler(kinds: Iterable[type[Optimizer]]) -> None:
    """Let optimizers work without torch's compiler until something else imports it.

    Their methods import it to keep it from compiling them. As long as it is not imported, nothing
    is compiled, and the methods that they wrap do the same.

    Args:
        kinds: classes of torch, whose methods are replaced.
    """
    if COMPILER in sys.modules:
        return
    for kind in kinds:
        for name, method in list(vars(kind).items()):
            if isinstance(method, FunctionType) and COMPILER in method.__code__.co_names:
                type.__setattr__(kind, name, _defer(method))


def _defer(method: FunctionType) -> Callable[..., Any]:
    inner: Callable[..., Any] | None = getattr(method, "__wrapped__", None)
    if inner is None:
        return method
    is_step = method.__name__ == "step"

    @wraps(method)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return method(self, *args, **kwargs)
        if not is_step:
            return inner(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inner(self, *args, **kwargs)

    return call
