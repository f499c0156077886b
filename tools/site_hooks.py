"""Hook of MkDocs: the documentation site shows the file name of a block above it."""

import re
from typing import Any

_NAMED_BLOCK = re.compile(r"^<!-- file: (?P<name>\S+) -->\n(?P<fence>```\w+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with the comment `<!-- file: NAME -->` before a block as the block's title."""
    return _NAMED_BLOCK.sub(r'\g<fence> title="\g<name>"', markdown)
