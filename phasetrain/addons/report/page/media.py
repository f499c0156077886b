"""The figures, images, texts and sounds of a report."""

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasetrain.addons.report.page.reading import RunReport
from phasetrain.runtime.html import element, escape_text

MAX_LISTED = 3
"""Number of items of a name that are shown, the newest ones."""

MAX_BYTES = 4 << 20
"""Size of all items in a page; of more, the page has the names of the files."""


def media_section(run: RunReport) -> str:
    """Return the section of media that the run has logged (`phasetrain.log_image`, ...), if any."""
    items: dict[str, list[Mapping[str, Any]]] = {}
    for line in run.lines:
        if line.kind == "media":
            items.setdefault(f"{line.split}/{line.content['name']}", []).append(line.content)
    room = MAX_BYTES
    parts = []
    for tag, logged in items.items():
        parts.append(element("h3", escape_text(tag)))
        for item in logged[-MAX_LISTED:]:
            file = f"media/{Path(str(item['file'])).name}"  # nothing outside of the run folder
            content = run.read_bytes(file)
            room -= len(content)
            shown = _show(str(item["media"]), content) if room >= 0 else ""
            caption = f"update {item['updates']:,}, {file}"
            parts.append(shown + element("p", escape_text(caption), cls="note"))
        if len(logged) > MAX_LISTED:
            text = f"the newest {MAX_LISTED} of {len(logged)}; all are in media/ of the run folder"
            parts.append(element("p", text, cls="note"))
    return "".join(parts)


def _show(kind: str, content: bytes) -> str:
    if kind == "text":
        return element("pre", escape_text(content.decode("utf-8", "replace")))
    data = b64encode(content).decode()
    if kind == "audio":
        return element("audio", controls="", src=f"data:audio/wav;base64,{data}")
    # Without an end tag, unlike `element`; base64 needs no escapes.
    return f'<img alt="" style="max-width:100%" src="data:image/png;base64,{data}">'
