"""Section OPTIMIZER: optimizer, parameter groups, schedules and gradient processing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.config.sections.keys import Section, key

SCHEDULED = (
    *("OPTIMIZER", "OPTIMIZER.groups[]"),
    *("OPTIMIZER.others.*", "OPTIMIZER.others.*.groups[]"),
)
"""Paths of the mappings that may have SCHEDULES."""


@dataclass(frozen=True, kw_only=True)
class LrScalingSection(Section):
    """Scaling of the learning rate with the batch size: linear (Goyal et al. 2017,
    arXiv:1706.02677) or by the square root (Krizhevsky 2014, arXiv:1404.5997)."""

    base_batch_size: int = key(256, "batch size for which lr was chosen", resume="adjustable", ge=1)
    rule: Literal["linear", "sqrt"] = key(
        "linear", "scale by the ratio of batch sizes, or its square root", resume="adjustable"
    )


@dataclass(frozen=True)
class SamSection(Section):
    """Sharpness-aware minimization (Foret et al. 2021, arXiv:2010.01412)."""

    rho: float = key(0.05, "radius of the neighborhood", resume="forbidden", gt=0)
    adaptive: bool = key(
        False,
        "scale the move of each weight by its square (Kwon et al. 2021, arXiv:2102.11600)",
        resume="forbidden",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection(Section):
    """Keys of a schedule next to its parameters."""

    every: Literal["update", "epoch"] = key(
        "update",
        "when the value changes: in each update, or at the start of an epoch; `every` of step is a "
        "duration",
        resume="adjustable",
    )


@dataclass(frozen=True, kw_only=True)
class CompositePartSection(Section):
    """Keys of a part of the schedule `composite` next to its parameters."""

    length: float | str | None = key(
        None, "duration of the part; null, for the last part: the rest", resume="adjustable"
    )
    scaling: Literal["rescaled", "fixed"] = key(
        "rescaled",
        "rescaled: the part runs from its start to its end; fixed: it goes by the whole run",
        resume="adjustable",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSection(Section):
    """The optimizer, its parameter groups and schedules, and gradient processing."""

    name: str = key(
        "sgd",
        "name of an optimizer, the class name of an optimizer in torch.optim, or a dotted path",
        resume="forbidden",
    )
    lr: float = key(
        0.1, "base learning rate; the schedule multiplies it", resume="adjustable", ge=0
    )
    auto_lr_scaling: Mapping[str, Any] | None = key(
        None,
        "scale lr with DATA.TRAIN.batch_size / `base_batch_size` (256); `rule`: linear or sqrt",
        resume="adjustable",
        fields=LrScalingSection,
    )
    state_from: str | None = key(
        None,
        "checkpoint, run folder or file with an `optimizer_state_dict` from which the optimizer "
        "starts: momentum and the like of all weights with the same name and shape; ignored on "
        "resume",
        resume="forbidden",
    )
    groups: tuple[Any, ...] = key(
        [],
        "rules for parameter groups: `match` (patterns for names), `types` (patterns for class "
        "names of modules) or `max_ndim`, with `lr_scale`, `SCHEDULES` or options of the optimizer",
        resume="forbidden",
    )
    layer_decay: float | None = key(
        None,
        "learning rate of each layer relative to the layer after it",
        resume="forbidden",
        gt=0,
        le=1,
    )
    others: Mapping[str, Any] = key(
        {},
        "label -> additional optimizer: `name`, `lr`, parameters, a rule that selects its weights "
        "(`match`, `types`, `max_ndim`), and its `groups` and `SCHEDULES`",
        resume="forbidden",
    )
    sam: Mapping[str, Any] | None = key(
        None,
        "sharpness-aware minimization with this optimizer: `rho` (0.05), `adaptive` (false)",
        resume="forbidden",
        fields=SamSection,
    )
    # Forbidden, although the batch stays the same: gradients are summed in another order, and batch
    # norm sees other batches.
    accumulate: int | None = key(
        None,
        "micro-batches per update on each rank (gradient accumulation); null: derived from "
        "DATA.TRAIN.micro_batch_size; a loss that compares samples with each other needs 1 and "
        "declares `coupled = True`",
        resume="forbidden",
        ge=1,
    )
    clip_norm: float | None = key(
        None,
        "maximum L2 norm of the gradient over all parameters; null: no clipping",
        resume="forbidden",
        gt=0,
    )
    clip_value: float | None = key(
        None,
        "maximum absolute value of each gradient element; null: no clipping",
        resume="forbidden",
        gt=0,
    )
    scaler: str | Mapping[str, Any] = key(
        "auto",
        "gradient scaler: `none`, `grad`, `auto` (grad for fp16, else none), or a mapping with "
        "`name` and parameters",
        resume="forbidden",
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] = key(
        "stop",
        "what to do if the loss or a gradient is NaN or infinite: stop the run before the update, "
        "skip the update, or do not check",
        resume="adjustable",
    )
    # Free: it decides whether the run stops, and never the result of an update.
    skip_budget: int = key(
        20,
        "maximum number of consecutive skipped updates before the run stops, including those "
        "skipped by a gradient scaler",
        resume="free",
        ge=0,
    )
    SCHEDULES: Mapping[str, Any] = key(
        {},
        "option of the optimizer (lr, weight_decay, ...) -> schedule: `name` and parameters",
        resume="adjustable",
    )


@dataclass(frozen=True, kw_only=True)
class OtherOptimizerSection(Section):
    """Keys of an entry of OPTIMIZER.others next to the parameters of the optimizer."""

    lr: float = key(0.1, "learning rate", resume="forbidden", ge=0)
    match: str | tuple[str, ...] = key([], "patterns for names of parameters", resume="forbidden")
    types: str | tuple[str, ...] = key([], "class names of modules", resume="forbidden")
    max_ndim: int | None = key(
        None, "maximum number of dimensions of its parameters", resume="forbidden", ge=0
    )
    groups: tuple[Mapping[str, Any], ...] = key(
        [], "rules for parameter groups, as in OPTIMIZER.groups", resume="forbidden"
    )
    clip_norm: float | None = key(
        None,
        "maximum L2 norm of its gradient, if the task has separate updaters; default: "
        "OPTIMIZER.clip_norm",
        resume="forbidden",
        gt=0,
    )
    clip_value: float | None = key(
        None,
        "maximum absolute value of each element of its gradient, if the task has separate "
        "updaters; default: OPTIMIZER.clip_value",
        resume="forbidden",
        gt=0,
    )
    scaler: str | Mapping[str, Any] = key(
        "auto",
        "its gradient scaler, if the task has separate updaters; default: OPTIMIZER.scaler",
        resume="forbidden",
    )
    SCHEDULES: Mapping[str, Any] = key(
        {}, "option of the optimizer -> schedule", resume="adjustable"
    )
