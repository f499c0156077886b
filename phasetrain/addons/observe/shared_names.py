"""A check for rules of optimizers that select weights of the model and of the loss by one name."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.optim.groups import SELECTORS, list_weights, select_weights
from phasetrain.runtime.format import join_first
from phasetrain.tasks import Task

log = logging.getLogger(__name__)


def check_shared_names(run_spec: RunSpec, task: Task) -> None:
    """Warn if `match` of a rule selects a weight of the model and one of the loss that have the
    same name; a rule for all weights is meant for both.

    Args:
        run_spec: the run.
        task: its task.
    """
    model, loss = list_weights(task.parts.model), list_weights(task.parts.loss)
    shared = {weight.name for weight in model} & {weight.name for weight in loss}
    if not shared:
        return
    model_kind, loss_kind = type(task.parts.model).__name__, type(task.parts.loss).__name__
    weights = list_weights(task.parts.model, task.parts.loss)
    frozen = list_weights(task.parts.model, task.parts.loss, trained=False)
    names = {weight.name for weight in weights}
    for key, rule in _list_rules(run_spec.setup.config.OPTIMIZER):
        # `select_weights` rejects a rule without an option.
        selectors = {name: rule[name] for name in SELECTORS if name in rule} | {"name": key}
        selected = select_weights(selectors, weights, key, frozen)
        both = sorted(selected & shared)
        if not both or selected == names:
            continue
        log.warning(
            "%s.match = %r selects %s of the model (%s) and %s of the loss (%s), which have the "
            "same name; if the rule is meant for one of them, rename the parameter of the other",
            key,
            rule["match"],
            join_first(both, 4),
            model_kind,
            join_first(both, 4),
            loss_kind,
        )


def _list_rules(section: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rules with `match` and their paths in the config.

    The rules within an optimizer of `others` are left out: it has the weights of its own rule.
    """
    rules = {f"OPTIMIZER.groups[{at}]": rule for at, rule in enumerate(section.get("groups") or ())}
    others = section.get("others") or {}
    rules |= {f"OPTIMIZER.others.{label}": rule for label, rule in others.items()}
    for key, rule in rules.items():
        if rule and "match" in rule:
            yield key, rule
