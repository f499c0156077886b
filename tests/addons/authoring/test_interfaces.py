"""What `phasetrain help` says of names of the Python interfaces."""

import re
from pathlib import Path

import pytest
from phasetrain.cli.help import topic_help

from phasetrain.addons.authoring.interfaces import explain_interface

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.feature(
    "help.interfaces",
    "help on methods, attributes and terms of custom parts",
    "`phasetrain help advance`",
)
@pytest.mark.parametrize(
    ("name", "heading", "shown", "words"),
    [
        ("advance", "in a custom part, see docs/loss.md", "advance(where, updates)", "before each"),
        ("where", "in a custom part, see docs/loss.md", "advance(where, updates)", "progress in"),
        ("where", "term, see docs/optimizer.md", "where", "updates done / updates"),
        ("stateful", "method of phasetrain.tasks.Task, see docs/task.md", "stateful()", "learns"),
        ("observe_only", "of phasetrain.hooks.Hook, see docs/hooks.md", "observe_only", "never"),
        ("recomputed", "optional in a custom part", "recomputed", "docs/machine.md"),
        ("add_rows", "of phasetrain.meters.Meter, see", "add_rows(name, shape, dtype)", "`(0, *s"),
        ("needs_target", "attribute of phasetrain.meters.Meter", "needs_target", "reads targets"),
        ("needs_target", "optional in a custom part", "needs_target", "ignores targets"),
        ("on_output", "method of phasetrain.hooks.Hook", "on_output(run, phase, batch, ", "None"),
        ("Hook.on_save", "method of phasetrain.hooks.Hook", "on_save(run)", "flush"),
        ("lengths", "optional in a custom part, see docs/data.md", "lengths()", "each sample"),
        ("begin_update", "method of phasetrain.tasks.Task", "begin_update(at)", "scheduled"),
    ],
)
def test_name_is_explained_by_a_docstring(name: str, heading: str, shown: str, words: str) -> None:
    paragraphs = explain_interface(name)
    matching = [lines for lines in paragraphs if heading in lines[0]]
    assert len(matching) == 1
    assert matching[0][1].startswith(f"  {shown}")
    assert words in "\n".join(matching[0][2:])
    assert "\n".join(matching[0]) in topic_help(name)


def test_pages_exist() -> None:
    names = ("stateful", "where", "on_step", "add_rows", "lengths", "advance", "load_state_dict")
    text = "\n".join(lines[0] for name in names for lines in explain_interface(name))
    pages = set(re.findall(r"docs/(\w+\.md)", text))
    assert {"data.md", "hooks.md", "loss.md", "meters.md", "optimizer.md", "task.md"} <= pages
    assert all((DOCS / page).is_file() for page in pages)


def test_private_and_unknown_names_are_not_explained() -> None:
    assert explain_interface("_rows") == []
    assert explain_interface("advanse") == []
    assert explain_interface("Meter.advance") == []
