"""Build the checkpointer and the hooks of a run from sections CHECKPOINT and HOOKS."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from inspect import isclass
from types import FunctionType
from typing import Any

from phasetrain.app.setup import Setup
from phasetrain.checkpoint import Checkpointer, Retention
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.nested import leaves
from phasetrain.config.sections import HookSection, own_keys
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook
from phasetrain.hooks.base import check_signatures
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.redaction import Redaction

log = logging.getLogger(__name__)

GivenHooks = Mapping[str, Hook | None] | Sequence[Hook | None]
"""Hooks from Python, by label or in a list; None stands for no hook."""

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def make_label(part: Any) -> str:
    """Return the label of a part: its name or the name of its class in snake case."""
    if isinstance(part, str):
        return part.rpartition(".")[2].lower()
    named = part if isclass(part) or isinstance(part, FunctionType) else type(part)
    return _WORD_START.sub("_", named.__name__.strip("<>")).lower()  # without those of <lambda>


def label_hooks(hooks: GivenHooks | None) -> dict[str, Hook]:
    """Return label -> hook of hooks from Python, without the entries that are None.

    A hook in a list gets the name of its class in snake case, the second of a class `NAME_2`.

    Raises:
        ConfigError: an entry is not a hook.
    """
    labelled: dict[str, Hook] = {}
    if hooks is not None and not isinstance(hooks, Mapping):
        names = [make_label(hook) for hook in hooks]
        counts = [names[: number + 1].count(name) for number, name in enumerate(names)]
        labels = [f"{name}_{n}" if n > 1 else name for name, n in zip(names, counts, strict=True)]
        hooks = dict(zip(labels, hooks, strict=True))
    for label, hook in (hooks or {}).items():
        if hook is not None:
            check_signatures(label, hook)
            labelled[label] = hook
    return labelled


def build_checkpointer(setup: Setup, folder: RunFolder) -> Checkpointer:
    """Return the checkpointer of a run folder, with the settings of section CHECKPOINT."""
    section = setup.config.CHECKPOINT
    retention = Retention(
        last=section.keep_last,
        every_updates=section.keep_every.updates,
        every_epochs=section.keep_every.epochs,
        monitor=section.best.monitor,
        best=section.best.keep,
    )
    return Checkpointer(
        folder.file("checkpoints"),
        folder.storage,
        retention=retention,
        verify=section.verify,
        say=log.warning,
    )


def build_hooks(setup: Setup) -> dict[str, Hook]:
    """Return label -> hook of section HOOKS."""
    return {
        label: build_hook(setup, label, section) for label, section in setup.config.HOOKS.items()
    }


def build_hook(setup: Setup, label: str, section: Mapping[str, Any]) -> Hook:
    """Return the hook of one entry of section HOOKS."""
    own = own_keys(HookSection) | {"name"}
    params = {key: value for key, value in section.items() if key not in own}
    facts = {
        "terminal": setup.terminal,
        "hparams": redact_secrets(flatten_config(setup.config), os.environ),
    }
    hook = HOOKS.build(section.get("name", label), params, where=f"HOOKS.{label}", facts=facts)
    check_signatures(label, hook)
    # Not read through HookSection: without the key, the policy is the hook's own default.
    hook.policy = section.get("on_exception", hook.policy)
    return hook


def list_hook_classes(section: Mapping[str, Any]) -> list[type[Hook]]:
    """Return the classes of the hooks of section HOOKS; functions as hooks have none."""
    factories = [
        HOOKS.find(params.get("name", label), f"HOOKS.{label}.name")
        for label, params in section.items()
    ]
    return [
        factory for factory in factories if isinstance(factory, type) and issubclass(factory, Hook)
    ]


def flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted path -> value of a config; empty mappings are left out, lists are values."""
    plain = config.plain() if isinstance(config, AttrDict) else config
    return {path: value for path, value in leaves(plain).items() if value != {}}


def redact_secrets(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return path -> value with secrets redacted, for values that leave the run folder; see
    `Redaction`."""
    redaction = Redaction(environment)
    return {path: redaction.redact_config(value, path) for path, value in values.items()}


def merge_hooks(first: Mapping[str, Hook], others: Mapping[str, Hook]) -> dict[str, Hook]:
    """Return the hooks of both mappings.

    Raises:
        ConfigError: a label is in both.
    """
    for label in first.keys() & others.keys():
        raise ConfigError(
            f"HOOKS.{label}: this run already has a hook with this label; choose another label, "
            f"such as my_{label}",
            code="config.conflict",
        )
    return {**first, **others}
