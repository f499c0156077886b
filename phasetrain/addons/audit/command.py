"""The command `phasetrain audit`."""

from phasetrain.addons.audit.flags import add_audit_arguments, audit_with_flags
from phasetrain.addons.audit.text import format_audit
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call

__all__ = ["add_audit_arguments", "run_audit"]


def run_audit(call: Call) -> Outcome:
    """Audit a training script."""
    result = audit_with_flags(call.flags)
    return Outcome(result.exit_code, format_audit(result), result.to_json())
