"""The verdict as an HTML page with the losses of both runs."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from phasetrain.addons.audit.auditor import Audit
from phasetrain.addons.audit.cost import describe_cost
from phasetrain.addons.audit.text import describe_question, list_effects

WIDTH, HEIGHT, MARGIN = 640, 220, 8

COLORS = ("#1f6feb", "#d1242f")

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem }
pre { background: #f6f8fa; padding: .6rem; overflow-x: auto; font-size: 13px }
svg { width: 100%; border: 1px solid #d0d7de } .place { color: #656d76 }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 }
pre { background: #161b22 } }"""


def write_page(audit: Audit, command: Sequence[str], path: Path) -> None:
    """Write the page to a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_lines(audit, command)) + "\n", encoding="utf-8")


def _lines(audit: Audit, command: Sequence[str]) -> Iterator[str]:
    yield "<!doctype html><html lang=en><meta charset=utf-8><title>Audit</title>"
    yield f"<style>{STYLE}</style><h1>{escape(audit.sentence)}</h1>"
    yield f"<pre>{escape(shlex.join(command))}</pre>"
    for check in audit.checks:
        verdict = "not exact" if check.exit_code else "exact"
        question = describe_question(check)
        yield f"<h2>{escape(question[0].upper() + question[1:])}: {verdict}</h2>"
        if check.curves:
            yield _draw(check.curves)
        for finding in check.findings:
            yield f"<p>{escape(finding.sentence)}</p>"
            if finding.place:
                yield f"<p class=place>{escape(finding.place)}</p>"
            if finding.remedy:
                yield f"<pre>{escape(finding.remedy)}</pre>"
        if check.findings:
            yield from (f"<p>{escape(line)}</p>" for line in list_effects(check))
        if check.cost is not None:
            yield f"<p>{escape(describe_cost(check.cost))}</p>"
    for note in audit.notes:
        yield f"<p>{escape(note)}</p>"
    yield "</html>"


def _draw(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Return an SVG of losses over updates."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    last = max(update for update, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    scale = (high - low) or 1.0

    def place(update: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * update / max(1, last)
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (high - loss) / scale
        return f"{x:.1f},{y:.1f}"

    lines = []
    for number, (name, curve) in enumerate(curves.items()):
        path = " ".join(place(update, loss) for update, loss in curve)
        color = COLORS[number % len(COLORS)]
        dashes = "" if number == 0 else " stroke-dasharray='5 3'"
        lines.append(
            f"<polyline points='{path}' fill=none stroke='{color}' stroke-width=1.5{dashes}>"
            f"<title>{escape(name)}</title></polyline>"
            f"<text x={WIDTH - 170} y={20 + 18 * number} fill='{color}' font-size=13>"
            f"{escape(name)}</text>"
        )
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>{''.join(lines)}</svg>"
