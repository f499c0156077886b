"""A check for losses that ignore targets, in a run that weights batches by samples."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.data import SampleReader
from phasetrain.engine.batch import IGNORED
from phasetrain.engine.plan import Phase
from phasetrain.losses import (
    CrossEntropy,
    FunctionLoss,
    WeightedSum,
    find_target_counter,
    name_loss,
)
from phasetrain.meters.base import meters_of
from phasetrain.meters.loss import MeanLoss
from phasetrain.proof.held import is_custom
from phasetrain.runtime.nested import list_tensors, map_tensors
from phasetrain.tasks import Task
from phasetrain.tasks.supervised import Supervised

log = logging.getLogger(__name__)

SAMPLES = 32
"""Samples of the first micro-batch of each split that are read."""


def check_ignored_targets(run_spec: RunSpec, task: Task) -> None:
    """Warn if the loss leaves targets of the data out of its mean, and batches are weighted by
    samples.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.
    """
    if not isinstance(task, Supervised) or type(task).weight_of is not Supervised.weight_of:
        return
    if effects := [*list_splits(run_spec), *list_test_effects(run_spec, task).values()]:
        _check_custom_losses(task, effects)
    splits: dict[tuple[nn.Module, int, bool], list[str]] = {}
    phases = {(phase.data, phase.stage): phase for phase, _ in reversed(run_spec.plan.phases.kinds)}
    for phase in reversed(phases.values()):
        loss = task.parts.losses[phase.stage] if task.parts.losses else task.parts.loss
        parts = dict(find_uncounted(loss))
        target = _read_target(task, phase) if parts else None
        for part, ignored in parts.items():
            taken = _select_classes(loss, part, target)
            if any(bool((classes == ignored).any()) for classes in taken):
                splits.setdefault((part, ignored, part is loss), []).append(phase.data.upper())
    for (part, ignored, is_alone), names in splits.items():
        log.warning(
            "LOSS: targets of DATA.%s are %d, which %s leaves out of its mean, and batches are "
            "weighted by samples. So the loss of a test depends on its batch size, and "
            "OPTIMIZER.accumulate or several ranks change an update; %s",
            " and DATA.".join(dict.fromkeys(names)),
            ignored,
            name_loss(part),
            _advise(part, ignored, is_alone=is_alone),
        )


def _check_custom_losses(task: Task, effects: Sequence[str]) -> None:
    """Warn if a custom loss may average over the targets that it does not ignore.

    Args:
        task: the task of the run.
        effects: why the means of parts of a batch or a test are averaged.
    """
    for loss in task.parts.losses or [task.parts.loss]:
        for part, _ in _list_custom_ignoring(loss):
            log.warning(
                "LOSS: %s declares ignore_index, and the means of batches and of their parts are "
                "weighted by samples: %s. If the loss is the mean over the other targets, this is "
                "not their mean over the whole batch or test: let `weight_of(batch)` of a custom "
                "task return the number of these targets; if it is the mean over samples, set "
                "coupled = False in its class",
                name_loss(part),
                " and ".join(effects),
            )


def _list_custom_ignoring(loss: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield each custom part of a loss that declares `ignore_index`, and its value, unless it
    declares that it is a mean over samples."""
    if find_target_counter(loss) is not None:
        return
    for part in loss.modules():
        source = part.function if isinstance(part, FunctionLoss) else type(part)
        ignored = getattr(part, "ignore_index", None)
        is_mean = getattr(part, "coupled", None) is False
        if isinstance(ignored, int) and is_custom(source) and not is_mean:
            yield part, ignored


def replace_reported_targets(loss: nn.Module, target: Any) -> Any:
    """Return the targets, with others of the same tensor instead of those whose effect on parts of
    a batch or a test `check_ignored_targets` reports.

    Args:
        loss: the loss.
        target: tensors, nested in any form.
    """
    reported = {ignored for _, ignored in find_uncounted(loss)}
    reported |= {ignored for _, ignored in _list_custom_ignoring(loss)}

    def fill(tensor: Tensor) -> Tensor:
        for ignored in reported:
            counted = tensor[tensor != ignored]
            if counted.numel():
                tensor = tensor.where(tensor != ignored, counted[0])
        return tensor

    return map_tensors(target, fill)


def find_uncounted(loss: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield each part of a loss that averages over the targets that it does not ignore, and the
    ignored class, if batches are not weighted by these targets."""
    if find_target_counter(loss) is not None:
        return
    for part in loss.modules():
        ignored: int | None = None
        if isinstance(part, CrossEntropy) and not part.per_sample:
            ignored = IGNORED if part.ignore_index is None else part.ignore_index
        elif isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss | FunctionLoss):
            ignored = part.ignore_index
        # What a custom function averages over is not known; `_check_custom_losses` warns.
        is_unknown = isinstance(part, FunctionLoss) and is_custom(part.function)
        if ignored is not None and not is_unknown:
            yield part, ignored


def _advise(part: nn.Module, ignored: int, *, is_alone: bool) -> str:
    """Return what to change."""
    if not is_alone:
        return (
            "if every sample has targets that count, use cross_entropy with per_sample: true in "
            "this term. It is another loss: the mean of the means of samples, to which a sample "
            "without such targets adds 0"
        )
    name = "" if isinstance(part, CrossEntropy) else "LOSS.name=cross_entropy and "
    return f"set {name}LOSS.ignore_index={ignored} to weight them by the targets that count"


def _select_classes(loss: nn.Module, part: nn.Module, target: Any) -> list[Tensor]:
    """Return the targets of integers that a part of a loss takes."""
    if isinstance(loss, WeightedSum) and isinstance(target, Mapping | list | tuple):
        entries = target.items() if isinstance(target, Mapping) else enumerate(target)
        # `select_target` returns all terms if none takes the entry.
        general = loss.select_target(None)
        takes_all = len(general) < len(loss.losses) and _contain(general, part)
        target = [
            value for key, value in entries if takes_all or _contain(loss.select_target(key), part)
        ]
    return [tensor for tensor in list_tensors(target) if not tensor.is_floating_point()]


def _contain(losses: Iterable[nn.Module], part: nn.Module) -> bool:
    return any(part is module for loss in losses for module in loss.modules())


def _read_target(task: Task, phase: Phase) -> Any:
    """Return the target of the first samples of a phase; None if they cannot be read."""
    loader = task.parts.loaders[phase.data]
    try:
        draw = loader.find_first_draw(phase)
        if isinstance(loader.reader, SampleReader):
            kept = None if draw.kept is None else draw.kept[:SAMPLES]
            draw = draw._replace(indices=draw.indices[:SAMPLES], kept=kept)
        return loader.read(draw).target
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("targets are not checked: %s: %s", type(error).__name__, error)
        return None


def list_splits(run_spec: RunSpec) -> list[str]:
    """Return the settings that compute a batch in parts."""
    setup = run_spec.setup
    config = setup.config
    sampler = config.DATA.TRAIN.sampler
    splits = {
        f"OPTIMIZER.accumulate = {config.OPTIMIZER.accumulate}": (
            (config.OPTIMIZER.accumulate or 1) > 1
        ),
        f"a world size of {setup.world.size}": not setup.world.is_single_process,
        "DISTRIBUTED.reduction = 'ordered'": config.DISTRIBUTED.reduction == "ordered",
        "max_tokens of DATA.TRAIN.sampler": (
            isinstance(sampler, Mapping) and sampler.get("max_tokens") is not None
        ),
    }
    return [text for text, is_set in splits.items() if is_set]


def list_test_effects(run_spec: RunSpec, task: Task) -> dict[str, str]:
    """Return test split -> sentence, for each of several batches whose loss is measured."""
    tested = {
        phase.data
        for phase, _ in run_spec.plan.phases.kinds
        if not phase.is_train and phase.steps > 1
    }
    return {
        name: f"{name}/loss, a mean over batches, depends on DATA.{name.upper()}.batch_size"
        for name in sorted(tested)
        if any(isinstance(meter, MeanLoss) for meter in meters_of(task.meters, name).values())
    }
