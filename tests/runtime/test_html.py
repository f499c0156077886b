"""Whatever stands in a run folder is shown as text and never becomes a part of the page."""

import json

from phasetrain.runtime.html import element, escape_text, script_data, table

EVIL = "</script><script>alert(1)</script>&\"'"


def test_escaping() -> None:
    assert escape_text('<b>&"') == "&lt;b&gt;&amp;&quot;"
    assert element("a", "x", href='"><script>', cls="c", data_line=1) == (
        '<a href="&quot;&gt;&lt;script&gt;" class="c" data-line="1">x</a>'
    )


def test_data_cannot_close_its_script() -> None:
    text = script_data({"name": EVIL})
    assert text.count("</script>") == 1
    assert text.count("<script") == 1
    assert json.loads(
        text.removeprefix('<script type="application/json">').removesuffix("</script>")
    ) == {"name": EVIL}


def test_table() -> None:
    assert table(("a", "<"), [("1", "<b>2</b>")], cls="k") == (
        '<div class="scroll"><table class="k"><thead><tr><th>a</th><th>&lt;</th></tr></thead>'
        "<tbody><tr><td>1</td><td><b>2</b></td></tr></tbody></table></div>"
    )
