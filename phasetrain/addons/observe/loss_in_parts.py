"""A check for custom losses whose value for a sample depends on other samples of the batch."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phasetrain.addons.observe.ignored_targets import (
    list_splits,
    list_test_effects,
    replace_reported_targets,
)
from phasetrain.addons.observe.perturbed import perturb_loss, perturb_tensors
from phasetrain.addons.observe.sample_rows import NoRowsError, take_rows
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.losses import (
    CoupledLoss,
    FromModel,
    FunctionLoss,
    find_target_counter,
    name_loss,
)
from phasetrain.proof.held import is_custom
from phasetrain.runtime.nested import list_tensors, map_tensors
from phasetrain.tasks import Position, Task
from phasetrain.tasks.build.coupling import list_coupled
from phasetrain.tasks.dry_run import preserve_state
from phasetrain.tasks.inference import eval_mode
from phasetrain.tasks.supervised import Supervised

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Relative difference that is taken for rounding. Not larger: with the small outputs of initial
weights, the losses of all pairs of samples are nearly equal."""

SPREAD = 4.0
"""Samples are also compared with factors from -4 to 4: at first, all may take the same branch."""


def check_loss_in_parts(run_spec: RunSpec, task: Task) -> None:
    """Warn if a batch is computed in parts, or a test has several batches, and a custom loss has
    another mean over parts.

    Nothing is compared if the loss declares `coupled`, or the task has its own `weight_of`, which
    may count something other than samples. A line says so if a loss cannot be compared: it draws
    random numbers, it fails for a part of a batch, or the rows of outputs and targets are not the
    samples, as after a collate function that concatenates them. Every rank has to call this. The
    task keeps its state; the global generators move.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.
    """
    training = run_spec.plan.first_training
    if training is None or not isinstance(task, Supervised) or task.shards_weights:
        return
    if type(task).weight_of is not Supervised.weight_of:
        return
    splits = list_splits(run_spec)
    loss = _find_loss(task, training)
    if splits:
        _check_scalar_outputs(run_spec, task, training, loss, splits)
    effects = [(training, f"{split} changes the loss") for split in splits]
    for name, text in list_test_effects(run_spec, task).items():
        effects.append((_find_test(run_spec, name), text))
    comparisons: dict[Phase, _Comparison] = {}
    for phase, _ in effects:
        if phase not in comparisons and is_undeclared(_find_loss(task, phase)):
            try:
                comparisons[phase] = _compare_phase(run_spec, task, phase)
            except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
                log.debug("LOSS is not compared: %s: %s", type(error).__name__, error)
    _report(loss, comparisons, effects)


def _report(
    loss: nn.Module,
    comparisons: Mapping[Phase, "_Comparison"],
    effects: Sequence[tuple[Phase, str]],
) -> None:
    """Log for which effects a loss deviates, and for which it cannot be compared."""
    unknown = [phase for phase, comparison in comparisons.items() if not comparison.cuts]
    if unknown:
        log.info(
            "LOSS: %s cannot be compared over parts of a batch: %s. Unless the loss is the mean "
            "over samples, %s; set coupled = True in its class if it compares samples, or "
            "coupled = False to turn this line off",
            name_loss(loss),
            comparisons[unknown[0]].reason,
            " and ".join(text for phase, text in effects if phase in unknown),
        )
    deviating = {
        phase: cut
        for phase, comparison in comparisons.items()
        if (cut := _find_deviation(comparison.cuts))
    }
    if not deviating:
        return
    first = next(iter(deviating))
    cut = deviating[first]
    log.warning(
        "LOSS: %s is %.4g for the first %d samples%s and %.4g on average over %s, so %s. "
        "If the loss compares samples with each other, set coupled = True in its class, and "
        "compute batches as a whole. If it is a mean by other weights than samples, return their "
        "sum from `weight_of` of the task; otherwise let it return the mean over samples, or set "
        "coupled = False to accept the difference",
        name_loss(loss),
        cut.whole,
        comparisons[first].samples,
        " with perturbed outputs" if cut.is_perturbed else "",
        cut.parts,
        cut.name,
        " and ".join(text for phase, text in effects if phase in deviating),
    )


def _find_loss(task: Task, phase: Phase) -> nn.Module:
    return task.parts.losses[phase.stage] if task.parts.losses else task.parts.loss


def _find_test(run_spec: RunSpec, name: str) -> Phase:
    """Return the first test of a split in several batches, of the trained weights: the preparation
    of averaged ones may take many batches."""
    phase = next(
        phase
        for phase, _ in run_spec.plan.phases.kinds
        if not phase.is_train and phase.data == name and phase.steps > 1
    )
    return replace(phase, split=phase.data)


class _Cut(NamedTuple):
    """A loss of a batch, and its mean over two parts.

    Attributes:
        whole: the loss of the batch.
        parts: the mean over the parts.
        name: of the parts.
    """

    whole: float
    parts: float
    name: str
    is_perturbed: bool = False


class _Comparison(NamedTuple):
    """The loss of the first batch of a phase over parts.

    Attributes:
        samples: samples of the batch.
        cuts: the values; empty if they cannot be compared.
        reason: why they cannot be compared.
    """

    samples: int
    cuts: list[_Cut]
    reason: str


def _compare_phase(run_spec: RunSpec, task: Task, phase: Phase) -> _Comparison:
    """Compare the loss of the first batch of a phase with its mean over parts, in the mode of the
    phase."""
    loss = _find_loss(task, phase)
    out = compute_first_batch(run_spec, task, phase, loss)
    try:
        # The number of targets, which weights the batches of a loss of torch that ignores some.
        count = find_target_counter(loss)
        out.target = replace_reported_targets(loss, out.target)
        with run_spec.machine.apply_settings(), torch.no_grad():
            cuts = _compare_parts(deepcopy(loss).train(phase.is_train), out, count)
            # Also after a deviation, which only one rank may see: a loss may call collectives.
            if cuts:
                cuts += _compare_perturbed(run_spec, loss, out, count, is_train=phase.is_train)
    except NoRowsError as error:
        return _Comparison(out.samples, [], str(error))
    except Exception as error:  # noqa: BLE001 - code of the user, for parts that it never gets
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return _Comparison(out.samples, [], reason)
    return _Comparison(out.samples, cuts, "it has another value in each call")


def _compare_perturbed(
    run_spec: RunSpec,
    loss: nn.Module,
    out: StepOutput,
    count: Callable[[Tensor], float] | None,
    *,
    is_train: bool,
) -> list[_Cut]:
    """Return the comparisons with perturbed outputs and a later state of the loss, since all
    samples may have the same loss at the start; empty if the loss does not take these outputs."""
    generator = torch.Generator().manual_seed(0)
    try:
        output = perturb_tensors(map_tensors(out.output, _widen), generator)
        # Tests use the values of the end of the schedules, see `Task.begin`.
        where = 0.5 if is_train else 1.0
        updates = int(where * run_spec.plan.updates)
        later = perturb_loss(
            loss, lambda copy: copy(output, out.target), where, updates, generator
        ).train(is_train)
        cuts = _compare_parts(later, replace(out, output=output), count)
    except Exception as error:  # noqa: BLE001 - noise may be no valid output
        log.debug("LOSS rejects perturbed outputs: %s: %s", type(error).__name__, error)
        return []
    return [
        cut._replace(is_perturbed=True)
        for cut in cuts
        if math.isfinite(cut.whole) and math.isfinite(cut.parts)
    ]


def _find_deviation(cuts: Sequence[_Cut]) -> _Cut | None:
    """Return the first comparison whose values differ by more than rounding; NaN is left
    to the checks of numbers that are not finite."""
    for cut in cuts:
        if not math.isnan(cut.whole) and not math.isclose(
            cut.whole, cut.parts, rel_tol=TOLERANCE, abs_tol=1e-6
        ):
            return cut
    return None


def _compare_parts(
    loss: nn.Module, out: StepOutput, count: Callable[[Tensor], float] | None
) -> list[_Cut]:
    """Return the losses of a batch over its halves and over unequal parts, which differ if halves
    have as many targets by chance; empty if the loss has no fixed value.

    Raises:
        ValueError: see `compare_means`; also for a single sample.
    """
    if out.samples < 2:
        raise ValueError("the first micro-batch has a single sample")

    def compute(output: Any, target: Any) -> Tensor:
        value: Tensor = deepcopy(loss)(output, target)  # a loss may change its state
        return value

    half, quarter = out.samples // 2, max(1, out.samples // 4)
    names = {quarter: f"parts of {quarter} and {out.samples - quarter} of them"}
    names[half] = "their halves"
    cuts = []
    for first in dict.fromkeys((half, quarter)):
        pair = compare_means(compute, out.output, out.target, count, out.samples, first)
        if pair is None:
            return []
        cuts.append(_Cut(*pair, names[first]))
    return cuts


def check_coupled_tests(run_spec: RunSpec, task: Task) -> None:
    """Warn if a custom loss that compares samples with each other is tested in several batches.

    There is no warning if the loss of a batch of the test is its mean over parts: a loss may
    compare samples in training only. This is not found out on several ranks, or for custom tasks.

    Args:
        run_spec: the run.
        task: its task.
    """
    losses = nn.ModuleList([task.parts.loss, *task.parts.losses])
    coupled = [part for part in list_coupled(losses) if is_custom(type(part))]
    if not coupled:
        return
    for name in list_test_effects(run_spec, task):
        if _is_mean_in_test(run_spec, task, name):
            continue
        key = name.upper()
        samples = run_spec.data[name].length
        log.warning(
            "DATA.%s: %s compares samples of a batch with each other, and %d samples are tested in "
            "batches of %d, so the loss of %s is a mean over batches and depends on "
            "DATA.%s.batch_size; compare it between runs with the same batch size only, or set "
            "DATA.%s.batch_size=%d; a function as a metric sees all samples of a test at once",
            key,
            name_loss(coupled[0]),
            samples,
            run_spec.setup.config.DATA[key].batch_size,
            name,
            key,
            key,
            samples,
        )


def _is_mean_in_test(run_spec: RunSpec, task: Task, name: str) -> bool:
    """Return whether the loss of the first batch of a test is the mean over its parts."""
    # A loss that gathers rows waits for the other ranks, whose batches may have other parts.
    if not run_spec.setup.world.is_single_process or not isinstance(task, Supervised):
        return False
    try:
        cuts = _compare_phase(run_spec, task, _find_test(run_spec, name)).cuts
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("LOSS of %s is not compared: %s: %s", name, type(error).__name__, error)
        return False
    return bool(cuts) and _find_deviation(cuts) is None


def _check_scalar_outputs(
    run_spec: RunSpec, task: Supervised, phase: Phase, loss: nn.Module, splits: Sequence[str]
) -> None:
    """Warn if the loss uses a scalar that the model computes over the batch, and parts have another
    mean of it.

    Dropout and batch normalization are off, since their outputs for parts differ anyway.
    """
    if any(isinstance(module, CoupledLoss | FromModel) for module in loss.modules()):
        return
    try:
        out = compute_first_batch(run_spec, task, phase, loss)
        with run_spec.machine.apply_settings():
            names = find_used_scalars(deepcopy(loss).train(), out.output, out.target)
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("outputs are not compared over parts: %s: %s", type(error).__name__, error)
        return
    means: dict[str, tuple[float, float]] = {}
    try:
        if names:
            means = _compare_scalars(run_spec, task, phase)
    except Exception as error:  # noqa: BLE001 - such as tensors without a row for each sample
        log.debug("outputs are not compared over parts: %s: %s", type(error).__name__, error)
    for name in names:
        # A scalar that is random, or missing in eval mode, has no means to compare.
        comparison = "its average over parts may be another value"
        if name in means:
            if not _differ(means[name]):
                continue
            whole, halves = means[name]
            comparison = f"it is {whole:.5g} for some samples and {halves:.5g} on average over "
            comparison += "their halves"
        log.warning(
            "LOSS uses the scalar %r of the model's output, which the model computes over a batch: "
            "%s, and %s changes the loss. Compute batches as a whole, or let the model return the "
            "values of samples, whose mean the loss takes; set coupled = False in the class of the "
            "loss to accept the difference",
            name,
            comparison,
            " and ".join(splits),
        )


def find_used_scalars(loss: Callable[[Any, Any], Tensor], output: Any, target: Any) -> list[str]:
    """Return the scalars in an output of a model on which a loss depends.

    Args:
        loss: function of output and target.
        output: mapping of tensors; there are no scalars in any other output.
        target: target of the loss.
    """
    if not isinstance(output, Mapping):
        return []
    scalars = {
        str(name): value.detach().clone().requires_grad_()
        for name, value in output.items()
        if isinstance(value, Tensor) and not value.ndim and value.is_floating_point()
    }
    if not scalars:
        return []
    with torch.enable_grad():
        value = loss({**output, **scalars}, target)
        if not value.requires_grad:
            return []
        gradients = torch.autograd.grad(value, list(scalars.values()), allow_unused=True)
    return [name for name, grad in zip(scalars, gradients, strict=True) if grad is not None]


def _compare_scalars(
    run_spec: RunSpec, task: Supervised, phase: Phase
) -> dict[str, tuple[float, float]]:
    """Return name -> value of a scalar output for the first samples, and its mean over the halves,
    as the model computes them in eval mode; without those that have no fixed value.

    If they are equal, the values are those of the samples times different factors.
    """
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    samples, half = batch.size, batch.size // 2
    factors = SPREAD * torch.arange(1.0, samples + 1).sin()

    def spread(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor * factors.view(-1, *[1] * (tensor.ndim - 1)).to(tensor)

    def compute(rows: slice, inputs: Any) -> Mapping[str, Any]:
        part = replace(
            batch,
            input=take_rows(inputs, rows, samples),
            target=take_rows(batch.target, rows, samples),
            ids=batch.ids[rows],
            size=len(batch.ids[rows]),
            mask=None,
        )
        output: Mapping[str, Any] = task.output_of(part.to(run_spec.machine.device))
        return output

    task.begin(phase, fresh=False)
    task.model = task.parts.model
    with (
        run_spec.machine.apply_settings(),
        preserve_state(task),
        torch.no_grad(),
        eval_mode(task.parts.model),
    ):
        means: dict[str, tuple[float, float]] = {}
        for inputs in (batch.input, map_tensors(batch.input, spread)):
            whole, again = compute(slice(None), inputs), compute(slice(None), inputs)
            first, second = compute(slice(half), inputs), compute(slice(half, None), inputs)
            for name, value in whole.items():
                is_fixed = isinstance(value, Tensor) and torch.equal(value, again[name])
                if not is_fixed or value.ndim or (name in means and _differ(means[name])):
                    continue
                parts = half * float(first[name]) + (samples - half) * float(second[name])
                means[name] = float(value), parts / samples
    return means


def _differ(pair: tuple[float, float]) -> bool:
    """Return whether a value and a mean over parts differ by more than rounding."""
    is_finite = all(map(math.isfinite, pair))
    return is_finite and not math.isclose(*pair, rel_tol=TOLERANCE, abs_tol=1e-6)


def compute_first_batch(run_spec: RunSpec, task: Task, phase: Phase, loss: nn.Module) -> StepOutput:
    """Return the output of the first micro-batch of a phase, without a graph.

    Args:
        run_spec: the run.
        task: its task, which keeps its state; the global generators move.
        phase: a phase of training or of a test.
        loss: loss of the phase.
    """
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    task.begin(phase, fresh=False)
    task.model, task.loss = task.parts.model, loss  # a wrapper would exchange gradients
    with run_spec.machine.apply_settings(), preserve_state(task), torch.no_grad():
        return task.run_forward(batch, Position(phase.split, 0, phase.first, 0.0))


def compare_means(
    loss: Callable[[Any, Any], Tensor],
    output: Any,
    target: Any,
    count: Callable[[Tensor], float] | None = None,
    samples: int | None = None,
    first: int | None = None,
) -> tuple[float, float] | None:
    """Return the loss of a batch, and the mean over two parts, weighted as micro-batches are.

    Args:
        loss: function of output and target.
        output: tensors `(N, ...)`, nested in any form, or lists with N entries.
        target: the same, or None.
        count: returns the weight of a part with these targets; None: its number of samples.
        samples: N; by default the rows of the first tensor.
        first: samples of the first part; by default half of them.

    Returns:
        None if the loss has no fixed value, or there are fewer than 2 samples.

    Raises:
        NoRowsError: a tensor does not have one row per sample.
    """
    samples = len(list_tensors([output, target])[0]) if samples is None else samples
    first = samples // 2 if first is None else first
    output = map_tensors(output, _widen)
    parts = [
        (
            end - begin,
            (
                take_rows(output, slice(begin, end), samples, "the model's output"),
                take_rows(target, slice(begin, end), samples, "the target"),
            ),
        )
        for begin, end in ((0, first), (first, samples))
    ]
    whole, again = float(loss(output, target)), float(loss(output, target))
    if samples < 2 or (whole != again and not (math.isnan(whole) and math.isnan(again))):
        return None
    weight_sum = value_sum = 0.0
    for rows, part in parts:
        weight = rows if count is None else count(part[1])
        if weight:  # the loss of a part without targets is NaN, and a step leaves it out
            weight_sum += weight
            value_sum += weight * float(loss(*part))
    return whole, value_sum / weight_sum


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor of 16-bit numbers in float32: rounding would look like a difference."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def is_undeclared(loss: nn.Module) -> bool:
    """Return whether a loss has custom code, and none of it says whether it is coupled."""
    modules = list(loss.modules())
    return not any(isinstance(module, CoupledLoss) for module in modules) and any(
        is_custom(module.function if isinstance(module, FunctionLoss) else type(module))
        for module in modules
    )
