"""Which hooks of a config only observe a run, so that their keys may change on resume."""

import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from phasetrain.config.schema import Schema
from phasetrain.hooks.base import HOOKS, Hook


def classify_hooks(
    schema: Schema, *configs: Mapping[str, Any], recorded: Collection[str] = ()
) -> Schema:
    """Return the schema in which the keys of observing hooks are free, and of all others
    adjustable.

    Args:
        schema: the keys.
        configs: configs that are compared; a hook observes if it does so in each that has it.
        recorded: labels of the observing hooks of the first config, as its checkpoint has them: a
            hook that was removed may have gone together with its module.
    """
    observers = dict[str, bool]()
    for number, config in enumerate(configs):
        observing = set(list_observers(config))
        if number == 0:
            observing.update(recorded)
        for label in config.get("HOOKS", {}):
            observers[label] = observers.get(label, True) and label in observing
    return schema.with_observers(label for label, observes in observers.items() if observes)


def list_observers(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the labels of the hooks of a config that only observe."""
    for label, section in config.get("HOOKS", {}).items():
        name = label
        if isinstance(section, Mapping):
            name = section.get("name", label)
        if is_observer(name):
            yield label


def is_observer(name: str) -> bool:
    """Return whether the class of this name, registered or a dotted path, is a hook that only
    observes; imports nothing."""
    factory: Any = None
    if name in HOOKS:
        factory = HOOKS[name]
    else:
        # The config of a checkpoint is data: a module that it names is never imported for it.
        module, _, attribute = name.rpartition(".")
        if module in sys.modules:
            factory = vars(sys.modules[module]).get(attribute)
    return inspect.isclass(factory) and issubclass(factory, Hook) and factory.observe_only
