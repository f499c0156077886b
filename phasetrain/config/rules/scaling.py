"""The learning rate that fits another batch size than the one it was found with
(OPTIMIZER.auto_lr_scaling)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from phasetrain.config.problems import shown
from phasetrain.errors import ConfigError, did_you_mean

SCALING: Mapping[str, Any] = MappingProxyType({"base_batch_size": 256, "rule": "linear"})
"""Keys of OPTIMIZER.auto_lr_scaling, with what they are when not given."""

RULES: Mapping[str, float] = MappingProxyType({"linear": 1.0, "sqrt": 0.5})
"""Rule -> power of the ratio of batch sizes."""


def lr_factor(section: Mapping[str, Any], batch_size: int) -> tuple[float, str]:
    """Return what a learning rate is multiplied by at a batch size, and why, in words.

    The rules are those of Goyal et al. 2017 (linear, arXiv:1706.02677) and Krizhevsky 2014 (sqrt,
    arXiv:1404.5997).

    Args:
        section: `base_batch_size`, with which the learning rate was found, and `rule`.
        batch_size: samples per update, over all processes and micro-batches.

    Raises:
        ConfigError: an unknown key or rule, or a base below 1.
    """
    where = "OPTIMIZER.auto_lr_scaling"
    for key in section.keys() - SCALING.keys():
        raise ConfigError(
            f"{where}.{key}: no such key{did_you_mean(key, SCALING) or '.'} It takes: {', '.join(SCALING)}"
        )
    given = {**SCALING, **section}
    base = given["base_batch_size"]
    rule = given["rule"]
    if isinstance(base, bool) or not isinstance(base, int) or base < 1:
        raise ConfigError(f"{where}.base_batch_size = {shown(base)}: expected int >= 1")
    if rule not in RULES:
        raise ConfigError(f"{where}.rule = {shown(rule)}: expected {' or '.join(RULES)}")
    ratio = f"batch_size {batch_size} / {base}"
    told = ratio if rule == "linear" else f"square root of {ratio}"
    return (batch_size / base) ** RULES[rule], f"auto_lr_scaling: times {told}"
