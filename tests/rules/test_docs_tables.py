"""The generated tables of the docs are those of the code, and each add-on has a page with its own."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from phasetrain.config.addons import AddOn, Command

pytestmark = pytest.mark.addon()  # the tables list the add-ons

ROOT = Path(__file__).parents[2]
PAGES = [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if "<!-- table: " in path.read_text()
]


@pytest.fixture(scope="module")
def tables() -> Any:
    """Return the module tools/docs_tables.py."""
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "tools" / "docs_tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_tables_of_a_page_are_up_to_date(path: Path, tables: Any) -> None:
    page = path.read_text("utf-8")
    assert page == tables.fill_tables(page), "run `make reference`"


def test_each_addon_has_a_page_with_its_table_and_an_example(tables: Any) -> None:
    names = [addon.name for addon in tables.list_own_addons()]
    assert "experiments" in names
    for name in names:
        page = (ROOT / "docs" / "addons" / f"{name}.md").read_text("utf-8")
        assert page.count(f"<!-- table: add-on {name} -->") == 1
        assert re.search(r"^(phasetrain|python) ", page, re.MULTILINE)


def test_table_of_an_addon_has_all_that_it_adds(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    addon = AddOn("extra", "phasetrain")
    addon.add_commands(Command("runs count", "A|B", "count runs", "m:run"))
    addon.add_parts("loss", {"from_model": "m"})
    addon.add_bridges("model", {"timm": "m"})
    addon.add_bridges("schedule", {"timm": "m"})
    addon.add_section("EXTRACT", "m:Section")
    addon.add_keys("RUN", "phasetrain.config.sections.optimizer:SamSection")
    addon.add_name("pack", "m:pack")
    monkeypatch.setattr(tables, "load_addons", lambda: (addon,))
    tables.list_tables.cache_clear()
    text = tables.fill_tables("a\n<!-- table: add-on extra -->\nold\n<!-- end of table -->\nb\n")
    tables.list_tables.cache_clear()
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


def test_unknown_table_is_an_error(tables: Any) -> None:
    with pytest.raises(KeyError, match="add-on nothing"):
        tables.fill_tables("<!-- table: add-on nothing -->\n<!-- end of table -->\n")
