"""The verdict as a page of plain text."""

from collections.abc import Iterator

from phasetrain.addons.audit.auditor import Audit

QUESTIONS = {
    "resume": "after a kill",
    "workers": "resumed with another number of workers",
    "second_kill": "killed again",
    "second_resume": "after a second kill",
    "torn_save": "after a kill while a checkpoint was written",
}
"""Name of a check -> what it asks."""


def format_audit(audit: Audit) -> str:
    """Return the verdict, what is not restored, and what usually fixes it."""
    return "\n".join(_lines(audit))


def _lines(audit: Audit) -> Iterator[str]:
    yield audit.sentence
    for check in audit.checks:
        yield ""
        yield f"{QUESTIONS[check.name]}: {'exact' if not check.exit_code else 'not exact'}"
        for number, finding in enumerate(check.findings, 1):
            yield f"  {number}. {finding.sentence}"
            if finding.place:
                yield f"     {finding.place}"
            for line in finding.remedy.splitlines():
                yield f"       {line}"
        if check.effects and check.findings:
            yield f"  As a consequence: {', '.join(check.effects)}."
    if audit.notes:
        yield ""
        yield from audit.notes
