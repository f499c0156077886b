"""A teacher that is a copy of the model and follows its weights."""

from copy import deepcopy
from math import cos, pi

import torch
from torch import nn

from phasetrain.distributed import Ordered
from phasetrain.errors import ConfigError
from phasetrain.models import Embedding
from phasetrain.tasks.parts import Parts


class MomentumTeacher:
    """A copy of the model whose weights t move towards the weights w of the model:
    t = m t + (1 - m) w.

    m goes along half a cosine wave over the training (Grill et al. 2020, arXiv:2006.07733, 3.3).

    Args:
        parts: parts of the task, with the model.
        momentum: m at the start, in [0, 1].
        momentum_end: m at the end.

    Attributes:
        model: the copy.

    Raises:
        ConfigError: the strategy or OPTIMIZER.sam does not support such a teacher.
    """

    def __init__(self, parts: Parts, momentum: float, momentum_end: float) -> None:
        _check_support(parts, momentum)
        self._student = parts.model
        self._momentum = momentum
        self._momentum_end = momentum_end
        if isinstance(parts.model, Embedding):
            model = parts.model.as_teacher()  # without the parts that only the student needs
        else:
            model = deepcopy(parts.model)
        self.model: nn.Module = model.requires_grad_(requires_grad=False)
        if parts.updater is not None:
            # It moves before the forward pass that may turn out not finite, so a skipped update has
            # to put it back.
            parts.updater.guard.protect(lambda: [*model.parameters(), *model.buffers()])

    @torch.no_grad()
    def move(self, where: float) -> None:
        """Move the weights towards the weights of the model, at `where` in the training, 0 to 1."""
        momentum = (
            self._momentum_end - (self._momentum_end - self._momentum) * (cos(pi * where) + 1) / 2
        )
        weights = dict(self._student.named_parameters())
        named = list(self.model.named_parameters())
        # By name: parameters of a teacher made by `as_teacher` may be a subset of the model's. One
        # private foreach call instead of a kernel per weight.
        torch._foreach_lerp_(
            [weight for _, weight in named], [weights[name] for name, _ in named], 1 - momentum
        )


def _check_support(parts: Parts, momentum: float) -> None:
    if parts.strategy is not None and parts.strategy.shards_weights:
        raise ConfigError(
            f"TASK.momentum = {momentum}: the teacher is a copy of the model, and with this "
            "DISTRIBUTED.strategy no rank has the whole model; use the strategy ddp or zero"
        )
    if isinstance(parts.strategy, Ordered):
        raise ConfigError(
            f"TASK.momentum = {momentum} and DISTRIBUTED.reduction = 'ordered': ordered reduction "
            "computes a batch in parts, and does not handle the running statistics of a teacher; "
            "set DISTRIBUTED.reduction=native"
        )
    if parts.updater is not None and parts.updater.sam is not None:
        raise ConfigError(
            f"TASK.momentum = {momentum} and OPTIMIZER.sam: the second pass of an update would "
            "change the running statistics of the teacher again; leave one of the two out"
        )
