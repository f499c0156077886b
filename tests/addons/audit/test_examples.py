"""The scripts of the README: a plain loop that does not resume exactly, and its twin that does."""

import sys
from pathlib import Path

import pytest

from phasetrain.addons.audit.auditor import audit

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "preempted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "exit_code", "codes"),
    [("by_hand.py", 1, ["samples", "length"]), ("with_fit.py", 0, [])],
)
def test_the_verdict_is_that_of_the_readme(
    script: str, exit_code: int, codes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    verdict = audit([sys.executable, script], quick=True)
    (check,) = verdict.checks
    assert [finding.code for finding in check.findings] == codes
    assert verdict.exit_code == exit_code
