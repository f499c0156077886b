"""Repeat the recipes whose data is installed, and list the verdicts.

    python tools/check_recipes.py [NAME ...] [--max-minutes M] [--first-epoch]

The exit code is 1 if a recipe was not reproduced. `--first-epoch` compares the weights after the
first epoch only, which is enough to notice that a change of the code changes results.
"""

import argparse
import json
import subprocess
import sys
from typing import Any


def call(*words: str) -> dict[str, Any]:
    """Run a command with `--json` and return what it printed."""
    command = [sys.executable, "-m", "phasetrain", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def main() -> int:
    """Check the recipes, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes or variants of them")
    parser.add_argument("--max-minutes", type=float, metavar="M", help="skip those that take more")
    parser.add_argument("--first-epoch", action="store_true")
    flags = parser.parse_args()
    failed = 0
    for one in call("recipes", "list")["recipes"]:
        name = one["name"]
        if flags.names and not {name, name.partition("/")[0]} & set(flags.names):
            continue
        if one["minutes"] is None:
            print(f"{name}: skipped, not measured", flush=True)
        elif one["missing"]:
            print(f"{name}: skipped, needs {', '.join(one['missing'])}", flush=True)
        elif flags.max_minutes is not None and one["minutes"] > flags.max_minutes:
            print(f"{name}: skipped, takes {one['minutes']} minutes", flush=True)
        else:
            words = ["--first-epoch"] if flags.first_epoch else []
            found = call("rerun", "--recipe", name, "RUN.verbosity=quiet", *words)
            failed += bool(found["exit_code"])
            errors = "; ".join(problem["message"] for problem in found["errors"])
            print(f"{name}: {found.get('verdict') or errors}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
