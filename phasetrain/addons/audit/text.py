"""The verdict as a page of plain text."""

from collections.abc import Iterator

from phasetrain.addons.audit.auditor import Audit
from phasetrain.addons.audit.cost import describe_cost
from phasetrain.addons.audit.verdict import Check

QUESTIONS = {
    "resume": "after a kill",
    "workers": "resumed with another number of workers",
    "second_kill": "killed again",
    "second_resume": "after a second kill",
    "torn_save": "after a kill while {file} was written",
}
"""Name of a check -> what it asks."""


def format_audit(audit: Audit) -> str:
    """Return the verdict, what is not restored, and what usually fixes it."""
    return "\n".join(_lines(audit))


def _lines(audit: Audit) -> Iterator[str]:
    yield audit.sentence
    for check in audit.checks:
        yield ""
        yield f"{describe_question(check)}: {'exact' if not check.exit_code else 'not exact'}"
        for number, finding in enumerate(check.findings, 1):
            yield f"  {number}. {finding.sentence}"
            if finding.place:
                yield f"     {finding.place}"
            for line in finding.remedy.splitlines():
                yield f"       {line}"
        if check.findings:
            yield from (f"  {line}" for line in list_effects(check))
        if check.cost is not None:
            yield f"  {describe_cost(check.cost)}"
    if audit.notes:
        yield ""
        yield from audit.notes


def describe_question(check: Check) -> str:
    """Return the question of a check."""
    return QUESTIONS[check.name].format(file=check.file)


def list_effects(check: Check) -> Iterator[str]:
    """Yield sentences that name the parts which differ besides the causes."""
    # Samples, weights and a loss follow from a cause. A generator may just not be saved.
    generators = [part for part in check.effects if part.startswith("generator.")]
    rest = [part for part in check.effects if part not in generators]
    if rest:
        yield f"As a consequence: {', '.join(rest)}."
    if generators:
        yield f"A consequence, or a cause as well: {', '.join(generators)}."
