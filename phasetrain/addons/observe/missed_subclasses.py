"""A check for rules of parameter groups that name a class and leave its subclasses out."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from phasetrain.app.preflight.run_spec import RunSpec
from phasetrain.proof.held import is_custom
from phasetrain.runtime.format import join_first
from phasetrain.runtime.name_patterns import as_list
from phasetrain.tasks import Task

log = logging.getLogger(__name__)


def check_missed_subclasses(run_spec: RunSpec, task: Task) -> None:
    """Warn of custom modules of a subclass of a class that `types` of a rule names, since a rule
    selects by the name of the class itself.

    Args:
        run_spec: the run.
        task: its task.
    """
    section = run_spec.setup.config.OPTIMIZER
    for where, rules in _list_rules(section):
        for number, rule in enumerate(rules):
            patterns = as_list(rule.get("types", []))
            names = as_list(rule.get("match", ["*"]))
            if missed := _list_missed(task, patterns, names):
                log.warning(
                    "%s[%d].types = %s selects by the name of a class, and %s: a subclass is not "
                    "selected; add its name to types if the rule is meant for it",
                    where,
                    number,
                    patterns,
                    join_first(missed, 4),
                )


def _list_rules(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "OPTIMIZER.groups", section.get("groups") or ()
    for label, other in (section.get("others") or {}).items():
        yield f"OPTIMIZER.others.{label}.groups", (other or {}).get("groups") or ()


def _list_missed(task: Task, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return sentences about custom classes with trained weights of these names, of which no
    pattern names the class, but one names a base class."""
    missed: dict[str, None] = {}
    for root in (task.parts.model, task.parts.loss):
        for path, module in root.named_modules():
            kind = type(module)
            has_weights = any(
                weight.requires_grad and _fits(f"{path}.{name}".lstrip("."), names)
                for name, weight in module.named_parameters(recurse=False)
            )
            if not has_weights or not is_custom(kind) or _fits(kind.__name__, patterns):
                continue
            for base in kind.__mro__[1 : kind.__mro__.index(nn.Module)]:
                if _fits(base.__name__, patterns):
                    missed[f"{kind.__name__} ({path}) is a subclass of {base.__name__}"] = None
                    break
    return list(missed)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
