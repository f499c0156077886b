"""The generated tables of the docs are those of the code, and each add-on has a page with its own."""

import re
from pathlib import Path

import docs_tables
import pytest
from docs_tables import fill_tables, list_own_addons

from phasetrain.config.addons import AddOn, Command

pytestmark = pytest.mark.addon()  # the tables list the add-ons

ROOT = Path(__file__).parents[2]
PAGES = [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if "<!-- table: " in path.read_text()
]


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_tables_of_a_page_are_up_to_date(path: Path) -> None:
    page = path.read_text("utf-8")
    assert page == fill_tables(page), "run `make reference`"


def test_each_addon_has_a_page_with_its_table_and_an_example() -> None:
    names = [addon.name for addon in list_own_addons()]
    assert "experiments" in names
    for name in names:
        page = (ROOT / "docs" / "addons" / f"{name}.md").read_text("utf-8")
        assert page.count(f"<!-- table: add-on {name} -->") == 1
        assert re.search(r"^(phasetrain|python) ", page, re.MULTILINE)


def test_table_of_an_addon_has_all_that_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    addon = AddOn("extra", "phasetrain")
    addon.add_commands(Command("runs count", "A|B", "count runs", "m:run"))
    addon.add_parts("loss", {"from_model": "m"})
    addon.add_bridges("model", {"timm": "m"})
    addon.add_bridges("schedule", {"timm": "m"})
    addon.add_section("EXTRACT", "m:Section")
    addon.add_keys("RUN", "phasetrain.config.sections.optimizer:SamSection")
    addon.add_name("pack", "m:pack")
    monkeypatch.setattr(docs_tables, "load_addons", lambda: (addon,))
    docs_tables.list_tables.cache_clear()
    text = fill_tables("a\n<!-- table: add-on extra -->\nold\n<!-- end of table -->\nb\n")
    docs_tables.list_tables.cache_clear()
    lines = text.splitlines()
    assert lines[:2] + lines[-2:] == [
        "a",
        "<!-- table: add-on extra -->",
        "<!-- end of table -->",
        "b",
    ]
    assert [line for line in lines if line.startswith("| ") and "`" in line] == [
        "| `phasetrain runs count A\\|B` | count runs |",
        "| `from_model` | [loss](../loss.md) | The output of the model is the loss, a scalar, or a "
        "mapping of names to losses, which are summed |",
        "| `timm.NAME` | [model](../model.md), [schedule](../optimizer.md) |",
        "| section | [`EXTRACT`](../reference.md#extract) |",
        "| keys | `RUN.adaptive`, `RUN.rho` |",
        "| Python | `phasetrain.pack` |",
    ]


def test_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="add-on nothing"):
        fill_tables("<!-- table: add-on nothing -->\n<!-- end of table -->\n")
