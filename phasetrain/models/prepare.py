"""What is done to a model on its way into training: SyncBatchNorm, activation checkpointing,
compilation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from phasetrain.distributed import find_buffers
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first

SHOWN = 12
"""Modules that an error lists."""


@dataclass(frozen=True)
class CompileSettings:
    """How torch.compile makes a model faster.

    Attributes:
        backend: name of what makes kernels: `inductor`, or for tests `eager` and `aot_eager`.
        mode: of inductor, such as `reduce-overhead`.
        fullgraph: raise where the model cannot be compiled in one piece.
        options: of the backend.
    """

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def synchronized(module: nn.Module, group: Any = None) -> nn.Module:
    """Return a module whose batch norms take their statistics over the batches of several
    processes.

    Parameters and buffers stay the same objects, under the same names.

    Args:
        module: holds the batch norms.
        group: torch's group of the processes; None takes all.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, group)  # type: ignore[no-untyped-call]
    return converted


def checkpoint_activations(model: nn.Module, rules: Sequence[str]) -> list[str]:
    """Let the modules that rules choose forget their activations, and compute them again in the
    backward pass.

    The model changes in place; names of parameters and buffers stay. Of modules inside one another
    the outermost is taken. Dropout draws the same numbers again, and buffers such as running
    statistics are updated once.

    Args:
        model: holds the modules; it is not chosen itself.
        rules: patterns (`*`, `?`, `[...]`) over names or classes of modules.

    Returns:
        the names of the chosen modules.

    Raises:
        ConfigError: a rule that chooses nothing, or a module that changes its input in place.
    """
    modules = {name: module for name, module in model.named_modules() if name and _computes(module)}
    chosen: list[str] = []
    for number, rule in enumerate(rules):
        found = [name for name, module in modules.items() if _fits(rule, name, module)]
        if not found:
            raise ConfigError(
                _no_module(f"MACHINE.activation_checkpointing[{number}] = {rule!r}", rule, modules)
            )
        chosen += found
    outermost = [name for name in modules if name in chosen and not _inside(name, chosen)]
    for name in outermost:
        module = modules[name]
        if vars(module).get("inplace"):
            raise ConfigError(
                f"MACHINE.activation_checkpointing chooses {name} ({type(module).__name__}), which changes its input "
                "in place, so that nothing is left to compute it from again; choose the module around it"
            )
        module.forward = partial(_forgetting, module.forward)
    return outermost


def check_compilable(
    model: nn.Module, forgetting: Sequence[str], settings: CompileSettings
) -> None:
    """Refuse a compiled model whose modules cannot compute their activations again as they were.

    Raises:
        ConfigError: one of them has running statistics, which a compiled graph could update twice,
            or the backend is one of those that run a graph as it is, without the random numbers of
            its first pass.
    """
    if forgetting and "eager" in settings.backend and not settings.backend.startswith("aot_"):
        raise ConfigError(
            f"MACHINE.compile.backend = {settings.backend!r} and MACHINE.activation_checkpointing: this backend draws "
            "other random numbers when it computes activations again; take aot_eager or inductor"
        )
    for name in forgetting:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                raise ConfigError(
                    f"MACHINE.compile and MACHINE.activation_checkpointing: {inner} ({type(module).__name__}) is among "
                    "the modules that are computed again, and compiled it could count its running statistics twice; "
                    "take a rule without it, or leave one of the two keys out"
                )


class Compiled(nn.Module):
    """Calls a network through torch.compile; the network and its state stay as they are.

    Kernels are made for the very shapes that are met (`dynamic=False`): kernels for shapes in
    general would be made once a second shape has come, and from then on bits would depend on what
    came before. For the same reason a network that was given too many shapes is not left uncompiled
    in silence.

    Args:
        network: what is called.
        settings: how it is compiled.

    Raises:
        ConfigError: no backend has this name, or it has no such mode or option; from `forward`,
            where the network cannot be compiled.
    """

    def __init__(self, network: nn.Module, settings: CompileSettings) -> None:
        super().__init__()
        import torch._dynamo  # takes seconds

        if settings.backend not in (known := torch._dynamo.list_backends(exclude_tags=())):
            near = did_you_mean(settings.backend, known)
            raise ConfigError(
                f"MACHINE.compile.backend = {settings.backend!r}: torch has no backend of this name{near or '.'} "
                f"Known: {', '.join(known)}"
            )
        # graphs of earlier runs of this process would count among those that torch allows
        torch.compiler.reset()
        self.network = network
        self._backend = settings.backend
        self._error = torch._dynamo.exc.TorchDynamoException
        self._limit = torch._dynamo.exc.FailOnRecompileLimitHit
        self._strict = partial(torch._dynamo.config.patch, fail_on_recompile_limit_hit=True)
        try:
            self._compiled: Callable[..., Any] = torch.compile(
                network.__call__,
                dynamic=False,
                fullgraph=settings.fullgraph,
                backend=settings.backend,
                mode=settings.mode,
                options=dict(settings.options) or None,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"MACHINE.compile: torch.compile refuses {settings}: {error}"
            ) from error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the network returns."""
        try:
            with self._strict():
                return self._compiled(*args, **kwargs)
        except self._limit as error:
            raise ConfigError(
                f"MACHINE.compile: the model has been compiled for {torch._dynamo.config.recompile_limit} shapes of "
                "batches, as many as torch allows, and was given another one; give all batches one shape, or set "
                "MACHINE.compile=null"
            ) from error
        except self._error as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(
                f"MACHINE.compile (backend {self._backend!r}): the model cannot be compiled for the batch that it was "
                f"given ({type(error).__name__}: {first}); MACHINE.compile=null shows whether it runs without"
            ) from error


def _forgetting(forward: MethodType, *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward, keeping its inputs instead of its activations."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # which takes no contexts; see `check_compilable`
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    module = forward.__self__
    assert isinstance(module, nn.Module)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=partial(_passes, module), **kwargs
    )


def _passes(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a pass and of its repetition, which begins with the same buffers and
    leaves none changed.

    Without them batch norm would count each batch twice, and a module that reads what it has
    updated would differ.
    """
    changed: list[_Change] = []
    return _noting(module, changed), _rewound(changed)


class _Change(NamedTuple):
    """A buffer that a pass has changed, or has put another tensor in the place of: `content` is
    None there."""

    buffers: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    content: Tensor | None


@contextmanager
def _noting(module: nn.Module, changed: list[_Change]) -> Iterator[None]:
    before = [
        (buffers, name, tensor, tensor._version, tensor.detach().clone())
        for buffers, name in find_buffers(module)
        if (tensor := buffers[name]) is not None
    ]
    yield
    for buffers, name, tensor, version, content in before:
        # Torch's batch norm updates running statistics, which are vectors, without counting a
        # version of them.
        if tensor._version != version or (tensor.ndim == 1 and buffers[name] is tensor):
            changed.append(_Change(buffers, name, tensor, content))
        elif buffers[name] is not tensor:
            changed.append(_Change(buffers, name, tensor, None))


@contextmanager
def _rewound(changed: list[_Change]) -> Iterator[None]:
    after = [
        _Change(buffers, name, now, now.detach().clone())
        for buffers, name, _, _ in changed
        if (now := buffers[name]) is not None
    ]
    _fill(changed)
    try:
        yield
    finally:
        _fill(after)


def _fill(values: Sequence[_Change]) -> None:
    with torch.no_grad():
        for buffers, name, tensor, content in values:
            buffers[name] = tensor
            if content is not None:
                tensor.copy_(content)


def _computes(module: nn.Module) -> bool:
    """Tell whether a module has a forward of its own; lists of modules have none."""
    return type(module).forward is not nn.Module.forward


def _fits(rule: str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, rule) or fnmatchcase(type(module).__name__, rule)


def _inside(name: str, chosen: Sequence[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in chosen for end in range(1, len(parts)))


def _no_module(what: str, rule: str, modules: Mapping[str, nn.Module]) -> str:
    classes = list(dict.fromkeys(type(module).__name__ for module in modules.values()))
    near = did_you_mean(rule, [*modules, *classes])
    return (
        f"{what}: no module of the model has such a name or class{near or '.'} Names: "
        f"{join_first(modules, SHOWN)}; classes: {', '.join(classes)}"
    )
