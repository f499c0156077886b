"""A check for padding of targets that the loss counts."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.data import SampleReader
from phasetrain.engine.batch import IGNORED
from phasetrain.engine.plan import Phase
from phasetrain.losses import FromModel, FunctionLoss, WeightedSum, find_ignore_index, name_loss
from phasetrain.proof.held import is_custom
from phasetrain.tasks import Task
from phasetrain.tasks.supervised import Supervised

log = logging.getLogger(__name__)

SAMPLES = 16
"""Samples of each split whose lengths are compared."""


def check_padded_targets(run_spec: RunSpec, task: Task) -> None:
    """Warn if `collate: pad` pads targets with a value that the loss does not ignore.

    Not reported are custom losses of numbers, or of mappings, which contain a mask, and classes
    padded with -100, which torch ignores.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.
    """
    if not isinstance(task, Supervised):
        return
    setup = run_spec.setup
    splits: dict[tuple[nn.Module, bool], dict[str, float]] = {}
    phases = {(phase.data, phase.stage): phase for phase, _ in reversed(run_spec.plan.phases.kinds)}
    for phase in reversed(phases.values()):
        config = setup.stages[phase.stage] if setup.stages else setup.config
        split = phase.data.upper()
        collate = config.DATA[split].collate
        options = collate if isinstance(collate, Mapping) else {"name": collate}
        if options.get("name") != "pad":
            continue
        loss = task.parts.losses[phase.stage] if task.parts.losses else task.parts.loss
        for entry, (value, is_number) in _find_padding(task, phase, options).items():
            for term in _list_counting(loss, entry, value, is_number=is_number):
                splits.setdefault((term, is_number), {})[split] = value
    for (term, is_number), values in splits.items():
        settings = " and ".join(
            f"DATA.{split}.collate.target_value = {value:g}" for split, value in values.items()
        )
        log.warning(
            "%s: targets are padded with %s, which %s counts like %s: the loss and the metrics of "
            "METERS are computed over the padding too; %s",
            settings,
            "it" if len(set(values.values())) == 1 else "them",
            name_loss(term),
            "real numbers" if is_number else "a class",
            "let the loss leave it out" if is_number else _advise(term, set(values.values())),
        )


def _advise(term: nn.Module, values: set[float]) -> str:
    """Return how to leave out classes that are padding."""
    value = next(iter(values)) if len(values) == 1 else IGNORED
    setting = f"set LOSS.ignore_index={value:g} of this loss"
    if is_custom(_get_code(term)):
        setting = f"let the loss leave it out, with an attribute ignore_index = {value:g}"
    elif isinstance(term, nn.CrossEntropyLoss | nn.NLLLoss | FunctionLoss):
        setting = f"set LOSS.name=cross_entropy and LOSS.ignore_index={value:g}"
    metrics = "metrics of METERS without an ignore_index of their own leave it out as well"
    if len(values) > 1:
        return f"pad all splits with one value, such as {IGNORED}, and {setting}; {metrics}"
    other = f"; if {value:g} is also a class, pad with another value, such as {IGNORED}"
    return f"{setting}; {metrics}{other}"


def _get_code(term: nn.Module) -> Any:
    return term.function if isinstance(term, FunctionLoss) else type(term)


def _find_padding(
    task: Task, phase: Phase, options: Mapping[str, Any]
) -> dict[str | None, tuple[float, bool]]:
    """Return the padding of each padded target of a phase, and whether the target consists of
    floating-point numbers, by its name; None: targets have no names."""
    lengths: dict[str | None, set[int]] = {}
    padding: dict[str | None, tuple[float, bool]] = {}
    fields = options.get("fields")
    value = options.get("target_value", IGNORED)
    for target in _read_targets(task, phase):
        entries = {None: target} if isinstance(target, Tensor) and fields is None else {}
        if isinstance(target, Mapping) and fields is not None:
            entries = {name: target[name] for name in fields if name in target}
        for name, tensor in entries.items():
            if not isinstance(tensor, Tensor) or tensor.ndim < 2:
                continue
            lengths.setdefault(name, set()).add(tensor.shape[1])
            own = value.get(name, IGNORED) if isinstance(value, Mapping) else value
            padding[name] = float(own), tensor.is_floating_point()
    return {name: padding[name] for name, several in lengths.items() if len(several) > 1}


def _read_targets(task: Task, phase: Phase) -> Iterator[Any]:
    """Yield the target of each of the first samples of a phase, as a batch of one sample; nothing
    if they cannot be read."""
    loader = task.parts.loaders[phase.data]
    if not isinstance(loader.reader, SampleReader):
        return
    try:
        draw = loader.find_first_draw(phase)
        for number in range(min(SAMPLES, len(draw.indices))):
            row = slice(number, number + 1)
            kept = None if draw.kept is None else draw.kept[row]
            yield loader.read(draw._replace(indices=draw.indices[row], kept=kept)).target
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("padding is not checked: %s: %s", type(error).__name__, error)


def _list_counting(
    loss: nn.Module, entry: str | None, value: float, *, is_number: bool
) -> Iterator[nn.Module]:
    """Yield the terms of a loss that take an entry of the targets and count the padding."""
    terms = [loss]
    if isinstance(loss, WeightedSum):
        terms = list(loss.losses.values()) if entry is None else loss.select_target(entry)
    for term in terms:
        if isinstance(term, FromModel) or not getattr(term, "needs_target", True):
            continue
        is_own = is_custom(_get_code(term))
        if is_own and (is_number or entry is not None):
            continue
        if is_number:
            is_ignored = math.isnan(value)  # a loss that counts it is NaN
        else:
            is_ignored = value == IGNORED or find_ignore_index([term]) == value
        if not is_ignored:
            yield term
