"""Weights, gradients and optimizer state sharded over ranks (torch's `fully_shard`, FSDP2)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from phasetrain.distributed import STRATEGIES, World
from phasetrain.distributed.dtensors import is_dtensor, local_shard, slice_like
from phasetrain.distributed.strategies.base import (
    NO_CONTEXT,
    GradientAveraging,
    Groups,
    MakeOptimizer,
    device_of,
)
from phasetrain.distributed.strategies.state import StateAdapter, Target
from phasetrain.errors import ConfigError
from phasetrain.runtime.name_patterns import match_modules

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ELEMENTWISE_OPTIMIZERS = frozenset(
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
"""Torch's optimizers that update each element independently, so a shard of a weight is enough."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose kernels need weights in the dtype of their running statistics, fp32."""


class DTensorState(StateAdapter):
    """State of modules whose weights are DTensors, and of an optimizer over their local shards.

    Attributes:
        pairs: each trained parameter, and the plain parameter over its local shard.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []

    def load_model_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a state of DTensors, or of whole tensors, which each rank slices."""
        own = module.state_dict()
        sharded = {name: _shard_value(value, own.get(name)) for name, value in state.items()}
        module.load_state_dict(sharded)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer by number of parameter, sharded as the parameters."""
        state = super().optimizer_state(optimizer)
        return {number: self._wrap_shards(int(number), values) for number, values in state.items()}

    def _wrap_shards(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        weight, local = self.pairs[number]
        wrapped = dict(values)
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == local.shape:
                wrapped[name] = _shard_like(value, weight)  # type: ignore[arg-type]
        return wrapped

    def local_optimizer_state(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return this rank's shards of a state of DTensors or of whole tensors."""
        local: dict[Any, dict[str, Any]] = {}
        for number, values in state.items():
            weight = self.pairs[int(number)][0]
            local[number] = dict(values)
            for name, value in values.items():
                if isinstance(value, Tensor):
                    local[number][name] = local_shard(_shard_value(value, weight))
        return local

    def model_targets(self, module: nn.Module, state: Mapping[str, Any]) -> list[Target]:
        """Return pairs of a saved tensor and the empty shard this rank reads it into."""
        own = module.state_dict()
        pairs = [(state[name], tensor) for name, tensor in own.items() if name in state]
        return [(saved, _empty_shard(saved, like)) for saved, like in pairs if _fits(saved, like)]

    def optimizer_targets(self, state: Mapping[Any, Any]) -> list[Target]:
        """Return the same pairs for the state of the optimizer."""
        return [
            (saved, _empty_shard(saved, self.pairs[int(number)][0]))
            for number, values in state.items()
            if int(number) < len(self.pairs)
            for saved in values.values()
            if _fits(saved, self.pairs[int(number)][0])
        ]


@STRATEGIES.register("fsdp")
@dataclass(eq=False, repr=False)
class FullyShard(GradientAveraging):
    """Each rank keeps a shard of each weight; weights are gathered when they are used (Zhao et al.
    2023, arXiv:2304.11277).

    The optimizer works on the local shards, with the same kernels as under other strategies. Its
    state is saved under the same names, so a run can switch between strategies.

    Args:
        world: fact; the ranks.
        precision: fact; MACHINE.precision.
        wrap: modules that are gathered one at a time, by patterns over their names or classes
            (`blocks.*`, `TransformerEncoderLayer`); the remaining weights are gathered together.
        replicas: number of complete copies of the weights, each sharded over a group of ranks
            (hybrid sharding).
        reshard_after_forward: free gathered weights after the forward pass and gather them again
            for the backward pass, which saves memory; weights outside of `wrap` are kept.
        param_dtype: dtype in which weights are gathered and computed; null: as
            MACHINE.precision. Those of batch norms stay fp32, as their running statistics.
        reduce_dtype: dtype in which gradients are reduced; null: fp32.
        cpu_offload: keep weights, gradients and the optimizer's state in CPU memory; no effect on
            a CPU.
        entrywise: a custom optimizer updates each element of a weight independently.
    """

    shards_optimizer = True
    shards_weights = True

    world: World
    _: KW_ONLY
    precision: str = "fp32"
    wrap: list[str] | None = None
    replicas: int = 1
    reshard_after_forward: bool = True
    param_dtype: Precision | None = None
    reduce_dtype: Precision | None = None
    cpu_offload: bool = False
    entrywise: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.world)
        if self.replicas < 1 or self.world.size % self.replicas:
            raise ValueError(
                f"replicas = {self.replicas}: expected a divisor of the number of processes, "
                f"which is {self.world.size}"
            )
        for key, value in (
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
        ):
            if value not in (None, *DTYPES):
                raise ValueError(f"{key} = {value!r}: expected null or one of {', '.join(DTYPES)}")
        self.state = self._dtensors = DTensorState()
        self._roots: list[Any] = []
        self._syncs_gradients = True
        self._shard_group: Any = None

    def prepare(self, model: nn.Module, loss: nn.Module) -> None:
        """Shard the weights of both modules in place.

        Raises:
            ConfigError: a pattern of `wrap` matches no module, or one without a forward pass, or
                this version of torch shards no weights on a CPU.
        """
        if device_of(model).type == "cpu" and "record_event" not in vars(torch.cpu.Stream):
            raise ConfigError(
                f"DISTRIBUTED.strategy = 'fsdp': torch {torch.__version__} shards weights on CUDA "
                "devices only; install torch 2.7 or later, or set DISTRIBUTED.strategy=ddp",
                code="distributed.needs_cuda",
            )
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        param_dtype, reduce_dtype = self._resolve_dtypes()
        device = device_of(model)
        offload = self.cpu_offload and device.type != "cpu"
        options: dict[str, Any] = {
            "mesh": self._make_mesh(device.type),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        casts = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        keeps_fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for name, module in self._modules_to_wrap(model, splits_norms=param_dtype is not None):
            try:
                fully_shard(
                    module,
                    mp_policy=keeps_fp32 if isinstance(module, BATCH_NORMS) else casts,
                    reshard_after_forward=self.reshard_after_forward,
                    **options,
                )
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(
                    f"DISTRIBUTED.wrap: module {name!r} cannot be wrapped: {error}",
                    code="distributed.cannot_wrap",
                ) from error
        # The loss is computed in fp32, as under autocast.
        loss_casts = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for root, policy in ((model, casts), (loss, loss_casts)):
            if next(root.parameters(), None) is not None:
                self._roots.append(fully_shard(root, mp_policy=policy, **options))

    def _resolve_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Return the dtypes of weights and of reductions; None: unchanged."""
        computed = self.param_dtype or self.precision
        param_dtype = None if computed == "fp32" else DTYPES[computed]
        if param_dtype is None and self.reduce_dtype is None:
            return None, None
        # fully_shard would reduce in param_dtype by default, which loses bits of small gradients.
        return param_dtype, DTYPES[self.reduce_dtype or "fp32"]

    def _make_mesh(self, device: str) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        if self.replicas == 1:
            mesh = init_device_mesh(device, (self.world.size,), mesh_dim_names=("shard",))
        else:
            sizes = (self.replicas, self.world.size // self.replicas)
            mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
        self._shard_group = mesh.get_group("shard")
        return mesh

    def _modules_to_wrap(
        self, model: nn.Module, *, splits_norms: bool
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that match a pattern, and batch norms if `splits_norms`; inner ones
        before outer ones."""
        modules = {name: module for name, module in model.named_modules() if name}
        norms = [name for name, module in modules.items() if isinstance(module, BATCH_NORMS)]
        chosen = set(norms if splits_norms else ())
        chosen |= {
            name
            for pattern in self.wrap or ()
            for name in match_modules(
                pattern,
                modules,
                f"DISTRIBUTED.wrap = [{pattern}]: it matches no name or class of a module",
                code="distributed.no_such_module",
            )
        }
        # fully_shard on an outer module claims all weights that no inner one has claimed before.
        for name, module in reversed(modules.items()):
            if name in chosen:
                yield name, module

    def make_optimizer(self, make: MakeOptimizer, groups: Groups) -> Optimizer:
        """Return the optimizer over this rank's local shards, which share memory with the weights.

        Raises:
            ConfigError: the optimizer is not known to update each element independently.
        """
        local_groups: Groups = []
        for group in groups:
            pairs = [
                (parameter, nn.Parameter(local_shard(parameter))) for parameter in group["params"]
            ]
            self._dtensors.pairs += pairs
            local_groups.append(group | {"params": [local for _, local in pairs]})
        optimizer = make(local_groups)
        name = type(optimizer).__name__
        is_torch = type(optimizer).__module__.startswith("torch.optim")
        if not self.entrywise and not (is_torch and name in ELEMENTWISE_OPTIMIZERS):
            raise ConfigError(
                f"OPTIMIZER.name: {name} is not known to update each element of a weight "
                "independently, as DISTRIBUTED.strategy = 'fsdp' requires, because each rank has a "
                f"shard of each weight; use one of {', '.join(sorted(ELEMENTWISE_OPTIMIZERS))}, "
                "set DISTRIBUTED.strategy=ddp, or set DISTRIBUTED.entrywise=true if it does",
                code="distributed.optimizer_not_elementwise",
            )
        return optimizer

    def optimizer_parameter(self, parameter: Tensor) -> Tensor:
        """Return the plain parameter over this rank's shard of a trained parameter."""
        return next(local for original, local in self._dtensors.pairs if original is parameter)

    def micro_batch(self, *, last: bool, counts: bool = True) -> AbstractContextManager[object]:
        """Return the context of a micro-batch; gradients are reduced in the last one."""
        if last != self._syncs_gradients:
            self._syncs_gradients = last
            for root in self._roots:
                root.set_requires_gradient_sync(last)
        return NO_CONTEXT

    def collect_gradients(self) -> None:
        """Move the gradients of the weights to the local shards that the optimizer updates."""
        for weight, local in self._dtensors.pairs:
            shard = local_shard(weight)
            # With cpu_offload, torch moves the weights into pinned memory at the first forward
            # pass: the optimizer has to follow, or it would update the old memory.
            if local.data_ptr() != shard.data_ptr():
                local.data = shard
            local.grad = None if weight.grad is None else local_shard(weight.grad)
            weight.grad = None

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the Euclidean norm of the whole gradient, 0-d, from the shards of all ranks."""
        device = gradients[0].device if gradients else self._dtensors.pairs[0][1].device
        local = get_total_norm(gradients).to(device)
        # In fp64: the square of a norm above 1.8e19 overflows fp32.
        squares = local.double().square()
        dist.all_reduce(squares, group=self._shard_group)
        return squares.sqrt().to(local.dtype)

    def any_rank(self, flag: Tensor) -> Tensor:
        """Return 1 if the flag of any rank is 1; changes it in place."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag


def _shard_like(local: Tensor, like: "DTensor") -> "DTensor":
    """Return a DTensor with the mesh and placements of `like`, from this rank's shard.

    Args:
        local: this rank's shard, on any device.
        like: DTensor with the global shape.
    """
    # DTensor.from_local() would check shards across ranks or infer the global shape from even
    # shards; with the spec given, neither a collective nor even shards are needed. Private API.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _fits(saved: Any, like: Any) -> bool:
    return (
        isinstance(saved, Tensor)
        and isinstance(like, Tensor)
        and is_dtensor(like)
        and saved.shape == like.shape
    )


def _empty_shard(saved: Tensor, like: Any) -> Tensor:
    return _shard_like(torch.empty_like(local_shard(like), dtype=saved.dtype), like)


def _shard_value(value: Any, like: Any) -> Any:
    """Return a whole tensor sharded as `like`; a DTensor or a value of another shape as it is."""
    if not _fits(value, like) or is_dtensor(value):
        return value
    return _shard_like(slice_like(value, like).to(local_shard(like).device), like)
