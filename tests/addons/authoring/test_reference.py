"""The reference of all keys: the page of the docs and the commented defaults."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from phasetrain.addons.authoring.reference import commented_defaults, main, reference_page
from phasetrain.config.schema import default_schema

ROOT = Path(__file__).parents[3]
SCHEMA = default_schema()


@pytest.mark.addon
def test_page_of_the_docs_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    assert page == reference_page(), "run `make reference`"


def test_page_has_every_key_but_those_that_test_splits_share_with_train() -> None:
    page = reference_page()
    missing = [
        path
        for path, key in SCHEMA.keys.items()
        if f"| `{path.rpartition('.')[2]}` | {key.type.text} | " not in page
    ]
    assert missing == []
    rows = page.partition("## DATA.TEST\n")[2].partition("\n## ")[0].count("\n| `")
    assert 0 < rows < 6


def test_commented_defaults_are_the_defaults() -> None:
    text = commented_defaults()
    assert OmegaConf.to_container(OmegaConf.create(text)) == SCHEMA.defaults
    assert (
        "  # seed from which all random streams of the run are derived; in a sweep, `seeds(5)` repeats each\n"
        "  # config with the seeds 0 to 4 (int >= 0; forbidden)\n" in text
    )


@pytest.mark.parametrize(
    ("words", "start"),
    [([], "# Reference\n"), (["yaml"], "# Engine, run folder")],
)
def test_command_prints_each_form(
    words: list[str], start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(words)
    assert capsys.readouterr().out.startswith(start)


def test_former_name_prints_the_reference_as_well() -> None:
    words = [sys.executable, "-W", "ignore", "-m", "phasetrain.config.reference", "yaml"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == commented_defaults()
