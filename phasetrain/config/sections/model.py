"""Sections TASK, MODEL, LOSS and METERS."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class TaskSection(Section):
    """The task, which computes losses and metrics."""

    name: str = key(
        "supervised",
        "name of a task, which computes the loss and the metrics of a batch",
        resume="forbidden",
    )


WhichWeights = Literal["model", "ema", "swa", "schedule_free"]
"""The trained weights of a checkpoint, or an average of them."""


@dataclass(frozen=True)
class EMASection(Section):
    """Exponential moving average of the weights (Polyak and Juditsky 1992)."""

    decay: float = key(
        0.999,
        "weight of the previous average in each update of the average",
        resume="forbidden",
        ge=0,
        lt=1,
    )
    warmup: bool = key(
        True,
        "start with a smaller decay: min(decay, (1 + t) / (10 + t)) with t earlier updates",
        resume="forbidden",
    )
    every: int = key(
        1, "optimizer updates between two updates of the average", resume="forbidden", ge=1
    )
    match: tuple[str, ...] = key(
        [],
        "patterns for names of the parameters to average, such as the names of one model of "
        "several; the others are copied; []: all",
        resume="forbidden",
    )
    statistics: Literal["copy", "average"] = key(
        "average",
        "running statistics of batch norms: `average` them like the weights, or `copy` them from "
        "the model; copied ones fit averaged weights worse",
        resume="forbidden",
    )
    test: bool = key(True, "test the average next to the trained weights", resume="forbidden")


@dataclass(frozen=True)
class SWASection(Section):
    """Stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407): the mean of the weights
    at several moments late in the run."""

    start: float | str = key(
        0.75,
        "when to take the first sample, the weights after this update: a fraction of the run, or a "
        "duration such as '5 epochs'",
        resume="forbidden",
    )
    every: float | str = key("1 epochs", "duration between two samples", resume="forbidden")
    batches: int = key(
        50,
        "training batches for recomputing batch norm statistics before each test",
        resume="forbidden",
        ge=1,
    )
    test: bool = key(True, "test the average next to the trained weights", resume="forbidden")


@dataclass(frozen=True)
class ScheduleFreeSection(Section):
    """The weights of a schedule-free optimizer that are meant for use (Defazio et al. 2024,
    arXiv:2405.15682)."""

    batches: int = key(
        50,
        "training batches for recomputing batch norm statistics before each test",
        resume="forbidden",
        ge=1,
    )
    test: bool = key(True, "test them next to the trained weights", resume="forbidden")


@dataclass(frozen=True, kw_only=True)
class AdapterSection(Section):
    """Keys of MODEL.adapters next to the parameters of the adapter."""

    name: str = key("lora", "name of an adapter", resume="forbidden")
    match: str | tuple[str, ...] = key(
        ["*"],
        "patterns for names of layers that get an adapter, such as blocks.*.attention.*",
        resume="forbidden",
    )
    train: str | tuple[str, ...] = key(
        [],
        "patterns for names of modules that are trained as a whole, such as a new head",
        resume="forbidden",
    )
    save_base: bool = key(
        False,
        "save the frozen weights in checkpoints; by default they come from MODEL.weights or the "
        "seed and are known by their digests",
        resume="forbidden",
    )


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """The model, its initial weights, and averages of its weights."""

    name: str = key(
        "mlp",
        "name of a model, or a dotted path to a torch.nn.Module or a function that returns one",
        resume="forbidden",
    )
    inputs_by_name: bool = key(
        False,
        "pass a mapping of inputs as keyword arguments, model(**inputs), and not as one argument",
        resume="forbidden",
    )
    weights: str | Mapping[str, Any] | tuple[Any, ...] | None = key(
        None,
        "weights to initialize from: the path of a file, a checkpoint or a run, a mapping with "
        "`path` and renaming rules, or a list, in which later entries win; ignored on resume, "
        "unless CHECKPOINT.exclude leaves out weights",
        resume="forbidden",
    )
    adapters: Mapping[str, Any] | None = key(
        None,
        "small trainable additions to layers of a frozen model: `name` (lora), `match` (patterns "
        "for layers), `train` (modules trained as a whole), `save_base` (false), and parameters "
        "such as `rank`",
        resume="forbidden",
    )
    freeze: tuple[str, ...] = key(
        [],
        "patterns for names of frozen modules or parameters: no gradient, no weight decay, modules "
        "in eval mode",
        resume="forbidden",
    )
    freeze_updates: tuple[Any, ...] = key(
        [],
        "rules for freezing at the start of the run: `match` (patterns as in `freeze`) and `for` "
        '(a number of updates, or a duration such as "2 epochs")',
        resume="forbidden",
    )
    ema: Mapping[str, Any] | None = key(
        None,
        "exponential moving average of the weights, tested as `test@ema`: `decay` (0.999), "
        "`warmup` (true), `every` (1 update), `test` (true)",
        resume="forbidden",
        fields=EMASection,
    )
    swa: Mapping[str, Any] | None = key(
        None,
        "mean of the weights late in the run, tested as `test@swa`: `start` (0.75 of the run), "
        '`every` ("1 epochs"), `batches` for batch norm (50), `test` (true)',
        resume="forbidden",
        fields=SWASection,
    )
    schedule_free: Mapping[str, Any] | None = key(
        None,
        "the average that a schedule-free optimizer keeps, tested as `test@schedule_free`: "
        "`batches` for batch norm (50), `test` (true)",
        resume="forbidden",
        fields=ScheduleFreeSection,
    )


@dataclass(frozen=True, kw_only=True)
class LossSection(Section):
    """The loss."""

    name: str = key(
        "cross_entropy",
        "name of a loss, the class name of a loss in torch.nn, or a dotted path",
        resume="forbidden",
    )


@dataclass(frozen=True, kw_only=True)
class MeterSection(Section):
    """Keys of an entry of METERS next to the parameters of the meter."""

    output: str | int | None = key(
        None, "entry of a mapping or list of outputs that it measures", resume="forbidden"
    )
    target: str | int | None = key(
        None, "entry of a mapping or list of targets that it measures", resume="forbidden"
    )
    splits: tuple[str, ...] | None = key(
        None, "splits of DATA that it measures, such as [TEST]; null: all", resume="forbidden"
    )


@dataclass(frozen=True, kw_only=True)
class WeightedLossSection(MeterSection):
    """Keys of an entry of LOSS.losses next to the parameters of the loss."""

    output: str | int | None = key(
        None, "entry of a mapping or list of outputs that the loss gets", resume="forbidden"
    )
    target: str | int | None = key(
        None, "entry of a mapping or list of targets that the loss gets", resume="forbidden"
    )
    splits: tuple[str, ...] | None = key(
        None,
        "splits of DATA for which the loss is computed, such as [TRAIN, TEST]; null: all",
        resume="forbidden",
    )
    weight: float | Literal["learned"] = key(
        1.0,
        "factor of the loss in the sum; learned: trained with the model (Kendall et al. 2018, "
        "arXiv:1705.07115)",
        resume="forbidden",
    )
