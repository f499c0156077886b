"""What saves a run and watches it, from its sections: CHECKPOINT and HOOKS."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from phasetrain.checkpoint import Checkpointer, Retention
from phasetrain.commands.setup import Setup
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook, SaveSettings
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.environment import Redaction

log = logging.getLogger(__name__)


def checkpointer_of(setup: Setup, folder: RunFolder) -> Checkpointer:
    """Return what reads and writes the checkpoints of a run folder, as section CHECKPOINT says."""
    section = setup.config.CHECKPOINT
    return Checkpointer(
        folder.file("checkpoints"),
        folder.storage,
        retention=Retention(
            section.keep_last,
            section.keep_every.updates,
            section.keep_every.epochs,
            section.best.monitor,
            section.best.keep,
        ),
        verify=section.verify,
        say=log.warning,
    )


def save_settings(setup: Setup) -> SaveSettings:
    """Return when and how to save, as section CHECKPOINT says."""
    section = setup.config.CHECKPOINT
    return SaveSettings(
        every_updates=section.every_updates,
        every_epochs=section.every_epochs,
        every_minutes=section.every_minutes,
        at_end=section.at_end,
        on_exception=section.on_exception,
        background=section.background,
        on_error=section.on_save_error,
        grace_seconds=section.grace_seconds,
        load_best=section.load_best,
    )


def hooks_of(setup: Setup) -> dict[str, Hook]:
    """Return the hooks that section HOOKS names, by label."""
    return {
        label: build_hook(setup, label, section) for label, section in setup.config.HOOKS.items()
    }


def build_hook(setup: Setup, label: str, section: Mapping[str, Any]) -> Hook:
    """Return the hook that an entry of section HOOKS describes."""
    params = {key: value for key, value in section.items() if key not in ("name", "on_exception")}
    facts = {
        "terminal": setup.terminal,
        "hparams": without_secrets(hparams(setup.config.plain()), os.environ),
    }
    hook = HOOKS.build(section.get("name", label), params, where=f"HOOKS.{label}", facts=facts)
    hook.policy = section.get("on_exception", hook.policy)
    return hook


def hparams(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of a config by dotted path; lists as they are."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= (
            hparams(value, f"{path}{key}.")
            if isinstance(value, Mapping)
            else {f"{path}{key}": value}
        )
    return found


def without_secrets(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return values of a config by path for what leaves the run folder: secrets are redacted, see
    `Redaction`."""
    clean = Redaction(environment)
    found = {}
    for path, value in values.items():
        shown = clean.words([f"{path}={value}"])[0].removeprefix(f"{path}=")
        found[path] = value if shown == str(value) else shown
    return found


def together(own: Mapping[str, Hook], others: Mapping[str, Hook]) -> dict[str, Hook]:
    """Return `own`, then the others, which may not take their labels."""
    for label in own.keys() & others.keys():
        raise ConfigError(
            f"HOOKS.{label}: this run has another hook under this label; give yours a label of its own, such as "
            f"my_{label}"
        )
    return {**own, **others}
