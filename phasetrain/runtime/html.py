"""Small pieces of HTML; all text from a run folder is escaped."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Rows = Iterable[Sequence[str]]


def escape_text(value: Any) -> str:
    """Return a value as text, escaped for HTML."""
    # Names of classes, logs and edited files are text of others, and reports are mailed around.
    # With quotes, so that the text may become an attribute too.
    return escape(str(value), quote=True)


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """Return an element.

    Args:
        tag: name of the element.
        content: HTML.
        attributes: values are escaped; `cls` is written as `class`, and `_` as `-`.
    """
    names = {"cls": "class"}
    attribute_text = "".join(
        f' {names.get(name, name.replace("_", "-"))}="{escape_text(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{attribute_text}>{content}</{tag}>"


def table(head: Sequence[str], rows: Rows, cls: str = "") -> str:
    """Return a table; cells are HTML, headings are text."""
    top = "".join(element("th", escape_text(heading)) for heading in head)
    body = "".join(element("tr", "".join(element("td", cell) for cell in row)) for row in rows)
    whole = element("table", element("thead", element("tr", top)) + element("tbody", body), cls=cls)
    return element("div", whole, cls="scroll")


def script_data(content: Any) -> str:
    """Return a script element with a value as JSON, which cannot close the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # escaped within JSON strings, where </script> would end the element
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json">{text}</script>'
