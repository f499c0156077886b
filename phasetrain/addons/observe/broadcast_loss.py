"""A check for custom losses in which an output and a target are broadcast against each other."""

import logging
from collections.abc import Sequence
from copy import deepcopy
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phasetrain.addons.observe.loss_in_parts import compute_first_batch, is_undeclared
from phasetrain.addons.observe.operators import OperatorMode
from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.losses import FunctionLoss, name_loss
from phasetrain.proof.held import is_custom
from phasetrain.tasks import Task
from phasetrain.tasks.supervised import Supervised

log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A loss, by name, with the shapes of its output and its target."""

    loss: str
    output: tuple[int, ...]
    target: tuple[int, ...]


def check_broadcast_loss(run_spec: RunSpec, task: Task) -> None:
    """Warn if a custom loss pairs every output with every target, as `output - target` does with
    shapes `(N, 1)` and `(N,)`.

    Nothing is checked if the loss declares `coupled`, or cannot be computed on the first batch.
    Every rank has to call this. The task keeps its state; the global generators move.

    Args:
        run_spec: the run.
        task: its task, before the first step or in a rehearsal.
    """
    phase = run_spec.plan.first_training
    if phase is None or not isinstance(task, Supervised) or task.shards_weights:
        return
    loss = task.parts.losses[phase.stage] if task.parts.losses else task.parts.loss
    if not is_undeclared(loss):
        return
    try:
        out = compute_first_batch(run_spec, task, phase, loss)
        pairs = find_broadcast(loss, out.output, out.target)
    except Exception as error:  # noqa: BLE001 - the rehearsal reports it, if it is a mistake
        log.debug("LOSS is not checked for broadcasting: %s: %s", type(error).__name__, error)
        return
    for name, output, target in pairs:
        log.warning(
            "LOSS: %s gets outputs %s and targets %s, and torch broadcasts them, so that every "
            "output is paired with every target; let the model return outputs of the shape of the "
            "targets, as output.squeeze(-1) does, or use target.unsqueeze(-1) in the loss. If the "
            "loss pairs samples on purpose, set coupled = True in its class",
            name,
            output,
            target,
        )


def find_broadcast(loss: nn.Module, output: Any, target: Any) -> list[Pair]:
    """Return each custom loss, in or equal to `loss`, that broadcasts its output and its target.

    Args:
        loss: a copy of it is called.
        output: output of a model.
        target: target of a batch.
    """
    loss = deepcopy(loss).train()
    watch = _Watch()
    for module in loss.modules():
        if is_custom(module.function if isinstance(module, FunctionLoss) else type(module)):
            module.register_forward_pre_hook(watch.enter)
            module.register_forward_hook(watch.leave, always_call=True)
    with torch.no_grad(), OperatorMode(watch.record):
        loss(output, target)
    return list(watch.pairs)


class _Watch:
    """Collects the losses that call an operator on output and target which broadcasts both."""

    def __init__(self) -> None:
        # The innermost call is the last one; None: it has not exactly two tensors.
        self._calls: list[Pair | None] = []
        self.pairs: dict[Pair, None] = {}

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Begin the call of a loss."""
        shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
        pair = Pair(name_loss(module), *shapes) if len(shapes) == 2 else None
        self._calls.append(pair)

    def leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """End the call of a loss."""
        self._calls.pop()

    def record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Record the current loss if this operator repeats both output and target."""
        pair = self._calls[-1] if self._calls else None
        if pair is None or not isinstance(result, Tensor):
            return
        shapes = {tuple(value.shape) for value in args if isinstance(value, Tensor)}
        # Equal shapes are not broadcast: torch.cdist, for one, compares all pairs on purpose.
        if (
            pair.output != pair.target
            and shapes == {pair.output, pair.target}
            and result.numel() > max(prod(pair.output), prod(pair.target))
        ):
            self.pairs[pair] = None
