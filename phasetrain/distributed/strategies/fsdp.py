"""Weights, gradients and the optimizer's state divided over processes (torch's `fully_shard`,
FSDP2)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from phasetrain.distributed.dtensors import is_dtensor, local_shard, shard_like, slice_like
from phasetrain.distributed.strategies.base import (
    _NOTHING,
    STRATEGIES,
    Groups,
    MakeOptimizer,
    Spreading,
    device_of,
)
from phasetrain.distributed.world import World
from phasetrain.errors import ConfigError, did_you_mean

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ENTRYWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Torch's optimizers that treat each entry of a weight for itself, so that a piece of a weight is
enough for them."""


@STRATEGIES.register("fsdp")
class FullyShard(Spreading):
    """Each process keeps a piece of each weight; weights are gathered where they are used (Zhao et
    al. 2023, arXiv:2304.11277).

    The optimizer works on the pieces, with the kernels that it has under other strategies. Its
    state is saved under the same names as theirs, so a run may change between them.

    Args:
        world: fact; the processes.
        precision: fact; MACHINE.precision.
        wrap: modules that are gathered one at a time, by patterns over their names or classes
            (`blocks.*`, `TransformerEncoderLayer`); what is left over is gathered as one.
        replicas: groups of processes that each keep a whole copy of the weights (hybrid sharding);
            1 keeps one copy.
        reshard_after_forward: drop gathered weights after the forward pass and gather them again
            for the backward one, which saves memory; what is left over by `wrap` is kept.
        param_dtype: what weights are gathered and computed in; null: fp32, or bf16, fp16 where
            MACHINE.precision says.
        reduce_dtype: what gradients are added in; null: fp32.
        cpu_offload: keep weights, gradients and the optimizer's state in the memory of the CPU;
            nothing on a CPU.
        entrywise: an optimizer of your own treats each entry of a weight for itself.
    """

    shards = True
    divides = True

    def __init__(
        self,
        world: World,
        *,
        precision: str = "fp32",
        wrap: list[str] | None = None,
        replicas: int = 1,
        reshard_after_forward: bool = True,
        param_dtype: Precision | None = None,
        reduce_dtype: Precision | None = None,
        cpu_offload: bool = False,
        entrywise: bool = False,
    ) -> None:
        super().__init__(world)
        if replicas < 1 or world.size % replicas:
            raise ValueError(
                f"replicas = {replicas}: expected a divisor of the number of processes, which is {world.size}"
            )
        for key, value in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
            if value not in (None, *DTYPES):
                raise ValueError(f"{key} = {value!r}: expected null or one of {', '.join(DTYPES)}")
        self._rules = list(wrap or ())
        self._replicas = replicas
        self._reshard = reshard_after_forward
        self._offload = cpu_offload
        self._entrywise = entrywise
        computed = param_dtype or precision
        self._param_dtype = None if computed == "fp32" else DTYPES[computed]
        self._reduce_dtype: torch.dtype | None
        if self._param_dtype or reduce_dtype:
            self._reduce_dtype = DTYPES[reduce_dtype or "fp32"]
        else:
            self._reduce_dtype = None
        self._roots: list[Any] = []
        self._syncs = True
        self._group: Any = None
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []

    def prepare(self, model: nn.Module, loss: nn.Module) -> None:
        """Divide the weights of both, in place.

        Raises:
            ConfigError: a rule of `wrap` fits no module, or one that has no forward pass of its
                own.
        """
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        device = device_of(model)
        mesh = self._mesh(device.type)
        offload = CPUOffloadPolicy() if self._offload and device.type != "cpu" else OffloadPolicy()
        options = {"mesh": mesh, "offload_policy": offload}
        casts = MixedPrecisionPolicy(param_dtype=self._param_dtype, reduce_dtype=self._reduce_dtype)
        for name, module in self._wrapped(model):
            try:
                fully_shard(module, mp_policy=casts, reshard_after_forward=self._reshard, **options)
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(
                    f"DISTRIBUTED.wrap: module {name!r} cannot be wrapped: {error}"
                ) from error
        for root, policy in (
            (model, casts),
            (loss, MixedPrecisionPolicy(reduce_dtype=self._reduce_dtype)),
        ):
            if next(root.parameters(), None) is not None:
                self._roots.append(fully_shard(root, mp_policy=policy, **options))

    def _mesh(self, device: str) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if self._replicas == 1:
            mesh = init_device_mesh(device, (self.world.size,), mesh_dim_names=("shard",))
        else:
            sizes = (self._replicas, self.world.size // self._replicas)
            mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
        self._group = mesh.get_group("shard")
        return mesh

    def _wrapped(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that the rules name, inner ones first."""
        modules = [(name, module) for name, module in model.named_modules() if name]
        names = [
            *(name for name, _ in modules),
            *sorted({type(module).__name__ for _, module in modules}),
        ]
        for rule in self._rules:
            if not any(fnmatchcase(name, rule) for name in names):
                raise ConfigError(
                    f"DISTRIBUTED.wrap = [{rule}]: no module of the model has a name or a class that fits"
                    f"{did_you_mean(rule, names) or '.'} Its classes are "
                    f"{', '.join(names[len(modules) :]) or 'none'}; its modules {', '.join(names[: len(modules)][:20])}"
                )
        for name, module in reversed(modules):
            if any(
                fnmatchcase(name, rule) or fnmatchcase(type(module).__name__, rule)
                for rule in self._rules
            ):
                yield name, module

    def optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return the optimizer over this process's pieces of the parameters, which lie in their
        memory.

        Raises:
            ConfigError: it is not known to treat each entry of a weight for itself.
        """
        pairs = [
            [(one, nn.Parameter(local_shard(one))) for one in group["params"]] for group in groups
        ]
        self._pairs = [pair for group in pairs for pair in group]
        made = make(
            [
                group | {"params": [own for _, own in mine]}
                for group, mine in zip(groups, pairs, strict=True)
            ]
        )
        known = type(made).__module__.startswith("torch.optim") and type(made).__name__ in ENTRYWISE
        if not known and not self._entrywise:
            raise ConfigError(
                f"OPTIMIZER.name: {type(made).__name__} is not known to treat each entry of a weight for itself, and "
                "under DISTRIBUTED.strategy = 'fsdp' each process has a piece of each weight; take one of "
                f"{', '.join(sorted(ENTRYWISE))}, the strategy ddp, or say that it does with DISTRIBUTED.entrywise=true"
            )
        return made

    def in_optimizer(self, parameter: Tensor) -> Tensor:
        """Return this process's piece of a trained parameter."""
        return next(own for one, own in self._pairs if one is parameter)

    def step(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context of a micro-batch; only in the last one of an update do gradients go
        round."""
        if last != self._syncs:
            self._syncs = last
            for root in self._roots:
                root.set_requires_gradient_sync(last)
        return _NOTHING

    def collect(self) -> None:
        """Give the pieces the gradients that the backward pass has left with the weights."""
        for one, own in self._pairs:
            local = local_shard(one)
            if (
                own.data_ptr() != local.data_ptr()
            ):  # torch pins memory for an offload at the first forward pass
                own.data = local
            own.grad = None if one.grad is None else local_shard(one.grad)
            one.grad = None

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the Euclidean norm of the whole gradient, 0-d, from the pieces of all
        processes."""
        device = gradients[0].device if gradients else self._pairs[0][1].device
        own = get_total_norm(gradients).to(device)
        squares = own.double().square()
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt().to(own.dtype)

    def any(self, flag: Tensor) -> Tensor:
        """Return 1 where the flag of any process is; changes it in place."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Take over what `model_state` returned, perhaps under another strategy: then each process
        its pieces."""
        own = module.state_dict()
        module.load_state_dict({name: _like(value, own.get(name)) for name, value in state.items()})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by number of parameter, divided as the parameters
        are."""
        state = super().optimizer_state(optimizer)
        return {number: self._as(self._pairs[int(number)], kept) for number, kept in state.items()}

    def _as(
        self, pair: tuple[nn.Parameter, nn.Parameter], kept: Mapping[str, Any]
    ) -> dict[str, Any]:
        one, own = pair
        return {
            name: shard_like(value, one)  # type: ignore[arg-type]
            if isinstance(value, Tensor) and value.shape == own.shape
            else value
            for name, value in kept.items()
        }

    def own_optimizer_state(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return this process's pieces of a state in which they may be divided, or whole."""
        return {
            number: {
                name: local_shard(_like(value, self._pairs[int(number)][0]))
                if isinstance(value, Tensor)
                else value
                for name, value in kept.items()
            }
            for number, kept in state.items()
        }

    def places(self, module: nn.Module, state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return for tensors of a saved state where this process takes its pieces of them."""
        own = module.state_dict()
        pairs = [(state[name], tensor) for name, tensor in own.items() if name in state]
        return [(saved, _empty(saved, like)) for saved, like in pairs if _fits(saved, like)]

    def optimizer_places(self, state: Mapping[Any, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return for tensors of a saved state of the optimizer where this process takes its pieces
        of them."""
        return [
            (saved, _empty(saved, self._pairs[int(number)][0]))
            for number, kept in state.items()
            if int(number) < len(self._pairs)
            for saved in kept.values()
            if _fits(saved, self._pairs[int(number)][0])
        ]


def _fits(saved: Any, like: Any) -> bool:
    return (
        isinstance(saved, Tensor)
        and isinstance(like, Tensor)
        and is_dtensor(like)
        and saved.shape == like.shape
    )


def _empty(saved: Tensor, like: Any) -> Tensor:
    return shard_like(torch.empty_like(local_shard(like), dtype=saved.dtype), like)


def _like(value: Any, like: Any) -> Any:
    """Return a value divided as `like` is, where it is whole and of the same shape."""
    if not _fits(value, like) or is_dtensor(value):
        return value
    return shard_like(slice_like(value, like).to(local_shard(like).device), like)
