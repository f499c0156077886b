"""Section HOOKS: label -> parameters of a hook."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class HooksSection(Section):
    """Label -> parameters of a hook. `name` defaults to the label; null removes a hook. Hooks are
    called in the order of the keys."""

    # In the order in which the hooks are called.
    console: Mapping[str, Any] = key(
        {}, "shows live progress on a terminal, and plain lines elsewhere", resume="free"
    )
    # The ledger comes before the hooks of a user, and so hashes batches before one of them can
    # replace a batch. As closing events come in reverse, its record of a step is made after theirs.
    ledger: Mapping[str, Any] = key(
        {},
        "writes steps.ledger, with which replay and comparison find where runs diverge",
        resume="free",
    )
    metrics: Mapping[str, Any] = key({}, "writes metrics.jsonl", resume="free")
    numerics: Mapping[str, Any] = key(
        {}, "dumps the first few steps with a nonfinite loss or gradient", resume="free"
    )


@dataclass(frozen=True, kw_only=True)
class HookSection(Section):
    """Keys of an entry of HOOKS next to the parameters of the hook."""

    # A hook class may have another default in `policy`, which counts unless the config sets the
    # key.
    on_exception: Literal["raise", "stop", "ignore"] = key(
        "raise",
        "what to do if the hook raises an exception: fail, stop the run at the next step boundary, "
        "or log it and continue",
        resume="free",
    )
