"""Default of HOOKS: the report is written by default."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class HookKeys(Section):
    """Hooks that are on by default."""

    report: Mapping[str, Any] = key(
        {},
        "writes report.html at the end of the run, with confusion matrices and samples of the last "
        "tests",
        resume="free",
    )
