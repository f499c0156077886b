"""Small pieces of HTML; whatever comes from a run folder is escaped."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Rows = Iterable[Sequence[str]]


def escaped(value: Any) -> str:
    """Return a value as text that HTML shows as it is."""
    return escape(str(value), quote=True)


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """Return an element around content that is HTML already.

    Args:
        attributes: `cls` stands for class, and `_` for `-`; values are escaped.
    """
    names = {"cls": "class"}
    given = "".join(
        f' {names.get(name, name.replace("_", "-"))}="{escaped(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{given}>{content}</{tag}>"


def table(head: Sequence[str], rows: Rows, cls: str = "") -> str:
    """Return a table; cells are HTML already, headings are text."""
    top = "".join(element("th", escaped(one)) for one in head)
    body = "".join(element("tr", "".join(element("td", cell) for cell in row)) for row in rows)
    whole = element("table", element("thead", element("tr", top)) + element("tbody", body), cls=cls)
    return element("div", whole, cls="scroll")


def script_data(content: Any) -> str:
    """Return a value as JSON in a script element that no content can close."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json">{text}</script>'
