"""Spikes of the training loss with the commands that explain them, and the answers."""

import shlex
from collections.abc import Mapping
from typing import Any

from phasetrain.addons.report.images import PREFIX
from phasetrain.addons.report.page.charts import list_spike_marks
from phasetrain.addons.report.page.reading import RunReport
from phasetrain.runs.records import parse_mapping
from phasetrain.runtime.format import join_first
from phasetrain.runtime.html import element, escape_text, table

PICTURES = {"image": "as drawn", "stored_image": "in the dataset"}


def spikes_section(run: RunReport) -> str:
    """Return the spikes of the training loss, with commands to copy, and answers of
    `phasetrain why`."""
    parts = []
    path = shlex.quote(run.path)
    for mark in list_spike_marks(run):
        update = f"{mark.x:.0f}"
        commands = f"phasetrain why {path} --update {update}\nphasetrain at {path} {update}"
        heading = element("h3", escape_text(f"Update {mark.x:,.0f}: {mark.label}"), id=mark.link)
        parts.append(heading + element("pre", escape_text(commands)))
    parts += [_draw_answer(answer) for answer in run.answers]
    return "".join(parts)


def _draw_answer(answer: Mapping[str, Any]) -> str:
    goal = parse_mapping(answer.get("goal"))
    heading = (
        f"Why {goal.get('name')} is {_format(goal.get('value'))} at update {goal.get('update')}"
    )
    parts = [element("h3", escape_text(heading)), element("p", escape_text(answer["answer"]))]
    parts += [_draw_sample(sample) for sample in map(parse_mapping, answer.get("samples") or ())]
    rows = [
        (
            escape_text(f"update {fork['update']} {fork['change']}"),
            escape_text(_format(fork["value"])),
            "yes" if fork["removes"] else "no",
        )
        for fork in map(parse_mapping, answer.get("forks") or ())
    ]
    parts.append(table(("trained again", str(goal.get("name")), "no spike"), rows, cls="figures"))
    cost = parse_mapping(answer.get("cost"))
    text = (
        f"cost: {cost.get('replayed')} updates to reach the state, and {cost.get('trained')} in "
        f"forks; the run has {cost.get('updates')}"
    )
    return "".join(parts) + element("p", escape_text(text), cls="note")


def _draw_sample(sample: Mapping[str, Any]) -> str:
    pictures = []
    for key, meaning in PICTURES.items():
        url = sample.get(key)
        if isinstance(url, str) and url.startswith(PREFIX):
            picture = f'<img src="{escape_text(url)}" alt="{escape_text(meaning)}">'
            pictures.append(element("div", picture + element("span", meaning), cls="sample"))
    lines = [
        f"sample {sample.get('id')}: input {sample.get('input')}; target {sample.get('target')}"
    ]
    if sample.get("text"):
        lines.append(f"text: {sample['text']!r}")
    if sample.get("updates"):
        lines.append(f"all updates with it: {join_first(sample['updates'], 12)}")
    drawn = element("div", "".join(pictures), cls="samples") if pictures else ""
    return drawn + element("p", "<br>".join(map(escape_text, lines)))


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "not finite"
