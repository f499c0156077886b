"""Scaling of the learning rate with the batch size (OPTIMIZER.auto_lr_scaling)."""

from collections.abc import Mapping
from types import MappingProxyType

from phasetrain.config.rules.draft import ConfigDraft
from phasetrain.config.sections.keys import fits_section, read_section
from phasetrain.config.sections.optimizer import LrScalingSection

RULES: Mapping[str, float] = MappingProxyType({"linear": 1.0, "sqrt": 0.5})
"""Rule -> power of the ratio of batch sizes."""


def scale_learning_rate(draft: ConfigDraft) -> None:
    """Multiply OPTIMIZER.lr as auto_lr_scaling says. auto_lr_scaling is null afterwards, so that a
    config written by this run is not scaled again."""
    optimizer = draft.config["OPTIMIZER"]
    scaling = optimizer["auto_lr_scaling"]
    if scaling is None or not fits_section(LrScalingSection, scaling):
        return  # other keys and types are reported by the validation
    section = read_section(LrScalingSection, scaling)
    factor, why = lr_factor(section, draft.config["DATA"]["TRAIN"]["batch_size"])
    draft.set("OPTIMIZER.lr", optimizer["lr"] * factor, why)
    draft.set("OPTIMIZER.auto_lr_scaling", None, "it is in OPTIMIZER.lr")


def lr_factor(section: LrScalingSection, batch_size: int) -> tuple[float, str]:
    """Return the factor of the learning rate at a batch size, and the reason in words.

    Args:
        section: the rule, and the batch size for which the learning rate was chosen.
        batch_size: samples per update, over all ranks and micro-batches.
    """
    ratio = f"batch_size {batch_size} / {section.base_batch_size}"
    in_words = ratio if section.rule == "linear" else f"square root of {ratio}"
    factor = (batch_size / section.base_batch_size) ** RULES[section.rule]
    return factor, f"auto_lr_scaling: times {in_words}"
