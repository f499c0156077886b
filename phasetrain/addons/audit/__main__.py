"""`python -m phasetrain.addons.audit`: the audit in an environment that has only torch."""

import argparse
import json
import sys

from phasetrain.addons.audit.flags import add_audit_arguments, audit_with_flags
from phasetrain.addons.audit.text import format_audit


def main() -> int:
    """Audit the command behind `--` and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m phasetrain.addons.audit",
        usage="%(prog)s [flags] -- COMMAND",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_audit_arguments(parser)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    flags = parser.parse_args(words[:end])
    flags.behind = words[end + 1 :]
    result = audit_with_flags(flags)
    text = json.dumps(result.to_json(), indent=1) if flags.json else format_audit(result)
    sys.stdout.write(f"{text}\n")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
