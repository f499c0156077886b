"""Warns of hooks that read a whole dataset although a run uses a part of it."""

import logging
from collections.abc import Mapping

from phasetrain.addons.observe.code_names import list_code_names
from phasetrain.hooks import Hook
from phasetrain.proof.held import find_holders, list_kinds
from phasetrain.tasks import Task

log = logging.getLogger(__name__)

AWARE = ("samples_of", "chosen")
"""Names that lead to the samples in use."""


def warn_of_held_out_samples(task: Task, hooks: Mapping[str, Hook]) -> None:
    """Warn of each custom hook whose code names `dataset_of` and nothing that leads to the samples
    in use, if a split has a subset.

    Args:
        task: the task, before the first step.
        hooks: label -> hook of the run.
    """
    loaders = task.parts.loaders
    subsets = [split for split in loaders if task.parts.samples_of(split).chosen is not None]
    if not subsets:
        return
    for label, hook in hooks.items():
        names = list_code_names(list_kinds(find_holders([(label, hook)])))
        if "dataset_of" not in names or not names.isdisjoint(AWARE):
            continue
        # Code that names no split takes it from the phase.
        named = [split for split in loaders if split in names] or subsets
        for split in subsets:
            if split in named:
                log.warning(
                    "HOOKS.%s: %s uses dataset_of, which returns the whole dataset, also the "
                    "samples that DATA.%s.subset holds out; to compute something from the samples "
                    "in use, take run.task.parts.samples_of(%r), see docs/hooks.md#custom-hooks",
                    label,
                    type(hook).__name__,
                    split.upper(),
                    split,
                )
                break
