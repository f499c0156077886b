"""Preparation of a model: its inputs, SyncBatchNorm, activation checkpointing, compilation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from phasetrain.distributed import find_buffers
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first
from phasetrain.runtime.name_patterns import match_modules

MAX_LISTED = 12
"""Maximum number of modules in an error."""


def require_shapes(module: nn.Module, where: str) -> None:
    """Check that every weight and buffer has a shape, which lazy layers get in the first
    forward pass only.

    Args:
        module: model or loss.
        where: config path, for the message.

    Raises:
        ConfigError: names the layers (code `model.lazy_layer`).
    """
    lazy = [
        f"{name or 'it'} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if any(
            is_lazy(tensor)
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        )
    ]
    if lazy:
        raise ConfigError(
            f"{where}: {join_first(lazy, MAX_LISTED)} has weights without a shape until the first "
            "forward pass, and the optimizer and a resume need the shapes before; use the layer "
            "that takes the number of inputs, such as nn.Linear for nn.LazyLinear, or call the "
            "model once when it is built",
            code="model.lazy_layer",
        )


def spread_mapping(
    _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call, with mappings spread over keyword arguments.

    Raises:
        ValueError: two of them have the same name.
    """
    # A batch has one input and one target, and models may take their entries by name.
    named: dict[str, Any] = dict(keywords)
    for mapping in inputs:
        if isinstance(mapping, Mapping):
            if twice := named.keys() & mapping.keys():
                raise ValueError(f"input and target both have an entry {min(twice)!r}")
            named |= mapping
    return tuple(value for value in inputs if not isinstance(value, Mapping)), named


def copy_expanded_buffers(module: nn.Module) -> None:
    """Replace buffers whose elements share memory, as after `expand`, by copies: no state
    could be loaded into them."""
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            sizes = zip(buffer.shape, buffer.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in sizes):
                # Not through `register_buffer`, which would make it persistent.
                layer._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class CompileSettings:
    """Settings of torch.compile.

    Attributes:
        backend: name of the backend: `inductor`, or for tests `eager` and `aot_eager`.
        mode: mode of inductor, such as `reduce-overhead`.
        fullgraph: raise if the model cannot be compiled as a single graph.
        options: options of the backend.
    """

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def convert_sync_batchnorm(module: nn.Module, group: Any = None) -> nn.Module:
    """Return a module whose batch norms compute their statistics over the batches of several ranks.

    Parameters and buffers stay the same objects under the same names.

    Args:
        module: the module with the batch norms.
        group: process group; None: all ranks.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(  # type: ignore[no-untyped-call]
        module, group
    )
    return converted


def checkpoint_activations(model: nn.Module, rules: Sequence[str]) -> list[str]:
    """Recompute the activations of the modules that rules select, instead of storing them.

    The model is changed in place; names of parameters and buffers stay. Of nested modules the
    outermost is used. Dropout draws the same numbers again, and buffers such as running statistics
    are updated once.

    Args:
        model: contains the modules; it cannot be selected itself.
        rules: patterns (`*`, `?`, `[...]`) over names or classes of modules.

    Returns:
        The names of the selected modules.

    Raises:
        ConfigError: a rule matches nothing, or a module changes its input in place.
    """
    modules = {
        name: module for name, module in model.named_modules() if name and _has_forward(module)
    }
    chosen: list[str] = []
    for number, rule in enumerate(rules):
        where = f"MACHINE.activation_checkpointing[{number}] = {rule!r}"
        chosen += match_modules(rule, modules, f"{where}: it matches no name or class of a module")
    # Nested checkpoints would recompute the inner module twice, and save little more memory.
    outermost = [name for name in modules if name in chosen and not _is_inside(name, chosen)]
    for name in outermost:
        module = modules[name]
        if vars(module).get("inplace"):
            raise ConfigError(
                f"MACHINE.activation_checkpointing: {name} ({type(module).__name__}) changes its "
                "input in place, so its output cannot be recomputed; select the module around it",
                code="config.conflict",
            )
        # Only forward is replaced: wrapping the module would change the names in the state dict.
        module.forward = partial(_run_checkpointed, module.forward)
    return outermost


def check_compilable(
    model: nn.Module, checkpointed: Sequence[str], settings: CompileSettings
) -> None:
    """Reject a compiled model with modules that cannot recompute their activations exactly.

    Raises:
        ConfigError: a module has running statistics, which a compiled graph could update twice, or
            the backend runs a graph as it is, without the random numbers of its first pass.
    """
    if checkpointed and "eager" in settings.backend and not settings.backend.startswith("aot_"):
        raise ConfigError(
            f"MACHINE.compile.backend = {settings.backend!r} with "
            "MACHINE.activation_checkpointing: this backend draws different random numbers in the "
            "recomputation; use aot_eager or inductor",
            code="config.conflict",
        )
    for name in checkpointed:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                raise ConfigError(
                    f"MACHINE.compile with MACHINE.activation_checkpointing: {inner} "
                    f"({type(module).__name__}) is recomputed, and compiled it could update its "
                    "running statistics twice; use a rule without it, or omit one of the two keys",
                    code="config.conflict",
                )


class PartNotCompiledError(ConfigError, AttributeError):
    """A task calls a part of a compiled model (exit code 2).

    `hasattr` takes it for a missing attribute.
    """


class CompiledModel(nn.Module):
    """Calls a model through torch.compile; the model and its state are unchanged.

    Only calls of the whole model are compiled, so its parts are not accessible.

    Args:
        model: the model to call.
        settings: how it is compiled.

    Raises:
        ConfigError: there is no such backend, mode or option; from `forward`: the model cannot be
            compiled.
    """

    def __init__(self, model: nn.Module, settings: CompileSettings) -> None:
        super().__init__()
        import torch._dynamo  # takes seconds, so only if a run compiles

        if settings.backend not in (backends := torch._dynamo.list_backends(exclude_tags=())):
            public = torch._dynamo.list_backends()  # without those for debugging
            near = did_you_mean(settings.backend, backends)
            raise ConfigError(
                f"MACHINE.compile.backend = {settings.backend!r}: torch has no such backend"
                f"{near or '.'} Known: {', '.join(public)}",
                code="config.unknown_value",
            )
        # Graphs of earlier runs in this process would count towards torch's recompile limit.
        torch.compiler.reset()
        self.model = model
        self._backend = settings.backend
        self._error = torch._dynamo.exc.TorchDynamoException
        self._limit = torch._dynamo.exc.FailOnRecompileLimitHit
        # Past the limit torch would silently run uncompiled, and from then on with other bits.
        self._limit_name, error_setting = "recompile_limit", "fail_on_recompile_limit_hit"
        if self._limit_name not in torch._dynamo.config.get_config_copy():  # torch 2.6
            self._limit_name, error_setting = "cache_size_limit", "fail_on_cache_limit_hit"
        self._strict = partial(torch._dynamo.config.patch, {error_setting: True})
        try:
            self._compiled: Callable[..., Any] = torch.compile(
                # The bound call instead of the module: torch.compile of a module returns a wrapper
                # whose state dict has the prefix `_orig_mod.`.
                model.__call__,
                # Kernels for exact shapes. With dynamic shapes torch switches to general kernels
                # at the second shape, so bits would depend on the batches that came before.
                dynamic=False,
                fullgraph=settings.fullgraph,
                backend=settings.backend,
                mode=settings.mode,
                options=dict(settings.options) or None,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"MACHINE.compile: torch.compile rejects {settings}: {error}"
            ) from error

    def __getattr__(self, name: str) -> Any:
        """Explain why a part of the model is missing here.

        Raises:
            PartNotCompiledError: the model has such an attribute.
            AttributeError: it has none.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "model" and name in dir(self.model):
                raise PartNotCompiledError(
                    f"MACHINE.compile: the task uses {name!r} of the model in training, and only "
                    "calls of the whole model are compiled; set MACHINE.compile=null",
                    code="config.conflict",
                ) from None
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        try:
            with self._strict():
                return self._compiled(*args, **kwargs)
        except self._limit as error:
            limit = torch._dynamo.config.get_config_copy()[self._limit_name]
            raise ConfigError(
                f"MACHINE.compile: the model has been compiled for {limit} batch shapes, torch's "
                "limit, and got another one; use batches of one shape, or set MACHINE.compile=null",
                code="config.compile_limit",
            ) from error
        except self._error as error:
            # Errors of the compiler contain whole graphs; the first line has the reason.
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(
                f"MACHINE.compile (backend {self._backend!r}): the model cannot be compiled for "
                f"this batch ({type(error).__name__}: {first}); try MACHINE.compile=null",
                code="config.compile_failed",
            ) from error


def _run_checkpointed(forward: MethodType, *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward, storing its inputs instead of its activations."""
    # Without a graph nothing is stored, so there is nothing to save.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # torch.compile does not support context_fn; `check_compilable` rejects modules that need it.
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    module = forward.__self__
    assert isinstance(module, nn.Module)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=partial(_make_contexts, module), **kwargs
    )


def _make_contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the forward pass and of its recomputation, which starts from the same
    buffers and leaves them unchanged.

    Without them batch norm would count each batch twice, and a module that reads a buffer it has
    updated would compute something else.
    """
    changed: list[_BufferChange] = []
    return _record_changes(module, changed), _rewind_buffers(changed)


class _BufferChange(NamedTuple):
    """A buffer that a pass has changed in place, or replaced by another tensor (`content` is
    None)."""

    buffers: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    content: Tensor | None


@contextmanager
def _record_changes(module: nn.Module, changed: list[_BufferChange]) -> Iterator[None]:
    before = [
        (buffers, name, tensor, tensor._version, tensor.detach().clone())
        for buffers, name in find_buffers(module)
        if (tensor := buffers[name]) is not None
    ]
    yield
    for buffers, name, tensor, version, content in before:
        # `_version` is private, but the only cheap sign of an in-place change. Torch's batch norm
        # updates its running statistics, which are vectors, without increasing it.
        if tensor._version != version or (tensor.ndim == 1 and buffers[name] is tensor):
            changed.append(_BufferChange(buffers, name, tensor, content))
        elif buffers[name] is not tensor:
            changed.append(_BufferChange(buffers, name, tensor, None))


@contextmanager
def _rewind_buffers(changed: list[_BufferChange]) -> Iterator[None]:
    after = [
        _BufferChange(buffers, name, now, now.detach().clone())
        for buffers, name, _, _ in changed
        if (now := buffers[name]) is not None
    ]
    _write_buffers(changed)
    try:
        yield
    finally:
        _write_buffers(after)


def _write_buffers(values: Sequence[_BufferChange]) -> None:
    with torch.no_grad():
        for buffers, name, tensor, content in values:
            buffers[name] = tensor
            if content is not None:
                tensor.copy_(content)


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module implements forward; containers such as ModuleList do not."""
    return type(module).forward is not nn.Module.forward


def _is_inside(name: str, chosen: Sequence[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in chosen for end in range(1, len(parts)))
