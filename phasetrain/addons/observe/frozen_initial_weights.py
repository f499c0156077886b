"""A check for weights that keep their random initial values, because they are neither loaded nor
trained."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from phasetrain.runtime.format import join_first

log = logging.getLogger(__name__)

MAX_LISTED = 4
"""Parameters named in the warning."""


def check_frozen_initial_weights(model: nn.Module, report: Mapping[str, Any]) -> None:
    """Warn of frozen weights that MODEL.weights leaves out, such as a new head next to adapters.

    Args:
        model: the model of the run.
        report: which of its tensors were loaded.
    """
    initial = {*report["reinit"], *report["missing"], *report["mismatched"]}
    frozen = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in initial and not parameter.requires_grad
    ]
    if frozen:
        log.warning(
            "MODEL.weights leaves %s at random initial values, and they are frozen, so they never "
            "train; train them, with adapters by MODEL.adapters.train, otherwise by other patterns "
            "in MODEL.freeze, or load values for them",
            join_first(frozen, MAX_LISTED),
        )
