"""Derivation of values from other values: the config that a run is built from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phasetrain.config.attrdict import ConfigDict
from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import origin_of
from phasetrain.config.engines import list_engines
from phasetrain.config.nested import leaves
from phasetrain.config.problems import raise_all
from phasetrain.config.rules.batch import (
    derive_batch_size,
    derive_ignored_targets,
    derive_micro_batches,
    derive_test_micro_batches,
    scale_learning_rate,
    share_batch,
)
from phasetrain.config.rules.draft import ConfigDraft
from phasetrain.config.rules.machine import (
    check_distributed,
    derive_compile,
    derive_device,
    derive_precision,
)
from phasetrain.config.rules.run import (
    check_launch,
    check_splits,
    derive_folder,
    derive_length,
    derive_monitor,
)
from phasetrain.config.schema import Schema


@dataclass(frozen=True)
class Derived:
    """The config that a run is built from.

    Attributes:
        config: frozen, complete.
        lines: one per value that a rule changed: `SECTION.key: a -> b (why)`.
    """

    config: ConfigDict
    lines: tuple[str, ...]


def derive(
    composed: Composed,
    schema: Schema,
    *,
    device: Callable[[], str],
    processes: int = 1,
    monitor: Callable[[], str] = lambda: "",
) -> Derived:
    """Return the config with all derived values; see `apply_rules`."""
    draft = apply_rules(composed, schema, device=device, processes=processes, monitor=monitor)
    derive_device(draft)
    return Derived(ConfigDict(draft.config), tuple(draft.lines))


def apply_rules(
    composed: Composed,
    schema: Schema,
    *,
    device: Callable[[], str],
    processes: int,
    monitor: Callable[[], str],
) -> ConfigDraft:
    """Apply the rules to a checked config, without replacing `MACHINE.device: auto`.

    Args:
        composed: the config.
        schema: the keys.
        device: returns the value that replaces `MACHINE.device: auto` on this machine; called only
            if a rule depends on it.
        processes: world size of the run; the name of the folder does not depend on it.
        monitor: returns the metric that replaces CHECKPOINT.best.monitor = auto; called only if it
            is needed.

    Raises:
        ConfigError: lists every rule that is violated: the length of training, micro-batches that
            do not divide the batch, a name that cannot be part of a folder's name.
    """
    draft = ConfigDraft(composed, device)
    # Tests and extraction take any number of processes.
    trains = list_engines()[draft.config["RUN"]["engine"]].needs_training_data
    derive_length(draft, trains=trains)
    derive_batch_size(draft)
    derive_micro_batches(draft, processes if trains else None)
    derive_test_micro_batches(draft)
    scale_learning_rate(draft)
    derive_monitor(draft, monitor)
    derive_precision(draft)
    derive_compile(draft)
    # Before share_batch, so that the folder is the same for every world size.
    derive_folder(draft, schema)
    derive_ignored_targets(draft)
    check_launch(draft)
    check_splits(draft)
    check_distributed(draft, processes)
    # Shares of a wrong batch size would only add errors that follow from the first one.
    if not draft.problems and (trains or processes == 1):
        share_batch(draft, processes)
    raise_all(draft.problems)
    return draft


def list_non_defaults(composed: Composed, schema: Schema) -> list[tuple[str, Any, str]]:
    """Return (path, value, layer) of each leaf that differs from its default, in the order of the
    keys."""
    non_defaults = []
    for path, value in leaves(composed.config).items():
        key = schema.key(path)
        if key is None or value != key.default:
            non_defaults.append((path, value, origin_of(composed.origins, path)))
    return non_defaults
