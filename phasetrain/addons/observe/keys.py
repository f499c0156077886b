"""Defaults of HOOKS: slow ranks and stalls are reported by default."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class HookKeys(Section):
    """Hooks that are on by default."""

    stragglers: Mapping[str, Any] = key(
        {}, "warns about a rank that all others wait for; inactive with one rank", resume="free"
    )
    watchdog: Mapping[str, Any] = key(
        {}, "writes the stack of every thread if no step completes for a long time", resume="free"
    )
