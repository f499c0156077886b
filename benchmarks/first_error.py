"""How many config mistakes are found before the first step, with the right suggestion first.

    python benchmarks/first_error.py [--seed 0] [--json FILE] [--show]

Starts 200 broken and 50 valid configs, generated from a seed by `first_error_corpus.py`, one after
the other in this process with RUN.rehearse=true, and ends each at its first step. A broken config
should fail before that, and its first suggestion should be right: the nearest name for a misspelled
one, the expected value for a wrong one, valid sizes if they do not divide, otherwise the key or
file at fault. Prints the figures and every miss.
"""

import argparse
import io
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from first_error_corpus import BROKEN, GOOD, Case, broken, good

from phasetrain.app.api import run
from phasetrain.errors import PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.runtime.terminal import Terminal

FOUND, NAMED, SECONDS = 0.95, 0.90, 5.0
"""What is asked for: shares of the broken configs, and the most seconds that one may take."""

MEANT = re.compile(r"did you mean '?([^'?;\s]+?)'?[?;.]*(?:\s|$)")


class Reached(BaseException):
    """Raised when the first step begins."""


class AtFirst(Hook):
    """Ends the run at its first step."""

    def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
        raise Reached


@dataclass(frozen=True)
class Tried:
    """Result of a config: the error (or an empty string), its type, and the seconds until then."""

    case: Case
    message: str
    kind: str
    seconds: float

    @property
    def found(self) -> bool:
        """Whether there was an error before the first step."""
        return bool(self.kind)

    @property
    def named(self) -> bool:
        """Whether the message is readable and its first suggestion is right."""
        first = first_problem(self.message)
        meant = MEANT.search(first)
        if self.case.meant:
            return meant is not None and meant[1] in self.case.fixes
        return any(fix in first for fix in self.case.fixes)


def first_problem(message: str) -> str:
    """Return the first mistake listed in a message."""
    lines = message.splitlines()
    return lines[1] if len(lines) > 2 and "problems in the config" in lines[0] else message


def tried(case: Case, folder: Path) -> Tried:
    """Start a config and return its result."""
    words = [word.replace("{here}", str(folder)) for word in case.words]
    case = replace(case, fixes=tuple(fix.replace("{here}", str(folder)) for fix in case.fixes))
    message = kind = ""
    began = time.perf_counter()
    try:
        run(
            [*words, f"RUN.dir={folder / 'run'}", "RUN.rehearse=true"],
            hooks={"first": AtFirst()},
            terminal=Terminal(io.StringIO(), live=False),
        )
    except Reached:
        pass
    except PhasetrainError as error:
        message, kind = str(error), type(error).__name__
    except Exception as error:  # noqa: BLE001 - any other one is found, too, but tells nobody what to do
        message, kind = str(error), f"{type(error).__name__} with a traceback"
    return Tried(case, message, kind, time.perf_counter() - began)


def all_tried(cases: Sequence[Case]) -> list[Tried]:
    """Start all configs, each in a separate folder, after a warm-up run."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tried(good(0)[0], Path(folder))
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            found.append(tried(case, Path(folder)))
    return found


def report(ones: Sequence[Tried]) -> dict[str, Any]:
    """Print figures and misses, and return the figures."""
    bad, fine = [one for one in ones if one.case.fixes], [one for one in ones if not one.case.fixes]
    for title, misses in (
        ("not found before the first step", [one for one in bad if not one.found]),
        (
            "found, but the right correction is not named first",
            [one for one in bad if one.found and not one.named],
        ),
        ("false alarms", [one for one in fine if one.found]),
        (f"longer than {SECONDS:g} s", [one for one in ones if one.seconds > SECONDS]),
    ):
        print(f"{title}: {len(misses)}")
        for one in misses:
            print(
                f"  [{one.case.kind}] {' '.join(one.case.own)}\n    wanted: "
                f"{' or '.join(one.case.fixes)}"
            )
            print(f"    {one.kind}: {first_problem(one.message)[:300]}  ({one.seconds:.1f} s)")
    kinds = Counter(one.case.kind for one in bad)
    print(f"{'kind':28} {'configs':>8} {'found':>6} {'named':>6}")
    for kind, count in kinds.items():
        of = [one for one in bad if one.case.kind == kind]
        print(
            f"{kind:28} {count:8} {sum(o.found for o in of):6} "
            f"{sum(o.found and o.named for o in of):6}"
        )
    figures = {
        "broken": len(bad),
        "found": sum(one.found for one in bad) / len(bad),
        "named": sum(one.found and one.named for one in bad) / len(bad),
        "good": len(fine),
        "false_alarms": sum(one.found for one in fine),
        "most_seconds": max(one.seconds for one in ones),
        "seconds": sum(one.seconds for one in ones),
    }
    print(
        f"{figures['found']:.1%} of {len(bad)} broken configs found before the first step, "
        f"{figures['named']:.1%} with "
        f"the right correction first; {figures['false_alarms']} false alarms in {len(fine)} good "
        "ones; the slowest "
        f"took {figures['most_seconds']:.1f} s, all together {figures['seconds']:.0f} s"
    )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print every message")
    given = parser.parse_args()
    ones = all_tried([*broken(given.seed, BROKEN), *good(given.seed, GOOD)])
    if given.show:
        for one in ones:
            print(
                f"[{one.case.kind}] {' '.join(one.case.own)}\n    {one.kind}: "
                f"{first_problem(one.message)}"
            )
    figures = report(ones)
    if given.json is not None:
        given.json.write_text(
            json.dumps({"figures": figures, "configs": [asdict(one) for one in ones]}, indent=1)
        )
    met = figures["found"] >= FOUND and figures["named"] >= NAMED and not figures["false_alarms"]
    return 0 if met and figures["most_seconds"] <= SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
