"""Draws the tree of runs that share their first updates as SVG."""

from collections.abc import Mapping

from phasetrain.addons.experiments.fork.prefix_tree import PrefixTree
from phasetrain.addons.report.page.svg import abbreviate, place_ticks
from phasetrain.runtime.format import shorten
from phasetrain.runtime.html import element, escape_text

WIDTH = 860
ROW = 26
LABEL = 200
RIGHT = 30
BOTTOM = 52
"""Sizes in pixels: the picture, a run, the labels on the left, and the margins."""

LABEL_LENGTH = 32
"""Maximum number of characters of a label."""

TICKS = 8
"""About how many updates are marked on the axis."""


def draw_tree(tree: PrefixTree, labels: Mapping[str, str]) -> str:
    """Return the figure of a tree: a line per run, from the update at which it is forked.

    Args:
        tree: the runs.
        labels: name of a run -> short text; runs without one show their values.
    """
    longest = max((branch.updates for branch in tree.branches), default=0) or 1
    scale = (WIDTH - LABEL - RIGHT) / longest
    # The latest fork first: a line down to a run then crosses no line of another run.
    rows = {index: ROW * (number + 1) for number, index in enumerate(tree.list_by_latest_fork())}
    marks = [_draw_axis(longest, scale, ROW * (len(rows) + 0.75))]
    for index, y in rows.items():
        branch = tree.branches[index]
        begin = LABEL + scale * branch.fork
        end = LABEL + scale * branch.updates
        title = element(
            "title", escape_text(f"{branch.label}: updates {branch.fork} to {branch.updates}")
        )
        lines = ""
        fork = ""
        if branch.parent is not None:
            parent = rows[branch.parent]
            lines = f"M{begin:.1f} {parent}V{y}"
            fork = f'<circle cx="{begin:.1f}" cy="{parent}" r="3"/>'
            fork += f'<text x="{begin + 4:.1f}" y="{y - 4}">{branch.fork:,}</text>'
        label = shorten(labels.get(branch.name) or branch.label or branch.name, LABEL_LENGTH)
        marks.append(
            f'<g class="line s0">{title}<path d="{lines}M{begin:.1f} {y}H{end:.1f}"/>{fork}</g>'
            f'<text x="{LABEL - 12}" y="{y + 4}" class="y">{escape_text(label)}</text>'
        )
    picture = element(
        "svg",
        "".join(marks),
        viewBox=f"0 0 {WIDTH} {ROW * len(rows) + BOTTOM}",
        role="img",
        aria_label=tree.summarize(),
    )
    note = "Each line is the part that a run trains itself, from the run that it is forked from."
    caption = element("figcaption", element("span", note))
    # Not of class `chart`, whose values the script of the page shows under the pointer.
    return element("figure", caption + picture, cls="tree")


def _draw_axis(longest: int, scale: float, y: float) -> str:
    parts = [f'<path d="M{LABEL} {y}h{longest * scale:.1f}" class="axis"/>']
    for update in place_ticks(0, longest, TICKS):
        x = LABEL + scale * update
        if update == int(update):
            parts.append(f'<path d="M{x:.1f} {ROW / 2}V{y}" class="grid"/>')
            parts.append(f'<text x="{x:.1f}" y="{y + 15}" class="x">{abbreviate(update)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{y + 28}" class="unit">updates</text>')
    return "".join(parts)
