"""Planted faults and clean scripts: what `phasetrain audit` says of each.

    python benchmarks/audit_faults.py [--only TEXT] [--json FILE]

A fault is named correctly if the first finding has its code, and says its part where one is given.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import audit_frameworks as frameworks
from audit_scripts import CLEAN, FAULTS, Script

from phasetrain.addons.audit.auditor import Audit, audit

VERDICTS = ("exact", "not exact", "not audited", "not deterministic")
"""Verdict on a released framework, by exit code."""


@dataclass(frozen=True)
class Result:
    """The verdict on one script.

    Attributes:
        right: whether the exit code and the first finding are as expected.
        said: the first finding, or the verdict.
    """

    name: str
    right: bool
    exit_code: int
    code: str
    said: str


def judge(script: Script) -> Result:
    """Audit a script in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script.text)
        previous = Path.cwd()
        os.chdir(folder)
        try:
            verdict = audit(script.command, quick=not script.full)
        finally:
            os.chdir(previous)
    return Result(
        script.name,
        is_right(script, verdict),
        verdict.exit_code,
        verdict.findings[0].code if verdict.findings else "",
        verdict.findings[0].sentence if verdict.findings else verdict.sentence,
    )


def is_right(script: Script, verdict: Audit) -> bool:
    """Return whether a verdict names the planted fault, or finds none in a clean script."""
    if verdict.exit_code != script.code:
        return False
    if not script.expected:
        return script.code != 0 or not verdict.findings
    first = verdict.findings[0]
    return first.code in script.expected and script.part in f"{first.part} {first.sentence}"


def run(scripts: Sequence[Script], title: str, *, is_test: bool) -> list[Result]:
    """Audit scripts and print a line for each: whether it is right, or for a measurement, the
    verdict."""
    print(f"{title}:")
    results = []
    for script in scripts:
        began = time.perf_counter()
        result = judge(script)
        results.append(result)
        took = time.perf_counter() - began
        verdict = "right" if result.right else "WRONG"
        if not is_test:
            verdict = VERDICTS[result.exit_code]
        print(f"  {verdict}  {script.name} ({took:.0f} s)", flush=True)
        print(
            f"         [{result.code or result.exit_code}] {result.said.splitlines()[0]}",
            flush=True,
        )
    if is_test:
        print(f"  {sum(result.right for result in results)} of {len(results)}")
    return results


def main() -> None:
    """Audit every script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="scripts whose names have this text")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    results = {}
    groups = {
        "faults": [*FAULTS, *frameworks.FAULTS],
        "clean scripts": [*CLEAN, *frameworks.CLEAN],
        "released frameworks": frameworks.RELEASED,
    }
    for title, scripts in groups.items():
        chosen = [script for script in scripts if flags.only in script.name]
        if chosen:
            is_test = title != "released frameworks"
            results[title] = [asdict(result) for result in run(chosen, title, is_test=is_test)]
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
