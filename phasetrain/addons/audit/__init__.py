"""Audit of any training script: does it resume exactly after a kill?

`python -m phasetrain.addons.audit` and `auditor.audit` need Python and torch only: neither Hydra
nor the rest of phasetrain is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasetrain.config.addons import AddOn

COMMAND = "phasetrain.addons.audit.command"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    from phasetrain.config.addons import Command

    addon.add_commands(
        Command(
            "audit",
            "[--kill-at N] [--resume 'COMMAND'] -- COMMAND",
            "kill any training script, resume it, and say what it does not restore",
            f"{COMMAND}:run_audit",
            arguments=f"{COMMAND}:add_audit_arguments",
        )
    )
    addon.add_name("audit", "phasetrain.addons.audit.auditor:audit")
