"""Every key is defined completely, and sections keep their naming rules."""

from typing import get_args

import pytest

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.schema import default_schema
from phasetrain.config.sections import (
    Config,
    Resume,
    TestSplitSection,
    TrainSplitSection,
    own_keys,
    read_section,
)

SCHEMA = default_schema()


def leaves(node: dict, path: str = "") -> set[str]:
    """Return the dotted paths of all values that are not filled mappings."""
    found = set()
    for name, value in node.items():
        here = f"{path}.{name}" if path else name
        found |= leaves(value, here) if isinstance(value, dict) and value else {here}
    return found


def test_keys_have_a_fitting_default_a_class_and_a_meaning() -> None:
    keys = SCHEMA.keys
    assert [path for path, key in keys.items() if not key.type.fits(key.default)] == []
    assert [path for path, key in keys.items() if key.resume not in get_args(Resume)] == []
    assert [path for path, key in keys.items() if len(key.meaning) <= 3] == []


def test_every_leaf_of_the_defaults_is_a_key() -> None:
    assert leaves(SCHEMA.defaults) == set(SCHEMA.keys)
    assert len(SCHEMA.keys) > 150


def test_sections_are_upper_case_and_keys_lower_case() -> None:
    for path, key in SCHEMA.keys.items():
        section, *names = path.split(".")
        assert section.isupper(), path
        labelled = key.type.text == "mapping"  # label -> part: a section below the section
        assert all(name.islower() or labelled or name in ("TRAIN", "TEST") for name in names), path


@pytest.mark.parametrize("section", ["LOSS", "TASK"])
def test_section_of_a_part_alone_has_only_a_name(section: str) -> None:
    assert set(SCHEMA.children(section)) == {"name"}


def test_keys_that_only_the_training_split_has() -> None:
    found = own_keys(TrainSplitSection) - own_keys(TestSplitSection)
    assert found == {"batch_transforms", "exclude"}


def test_typed_sections_have_the_defaults_of_the_schema() -> None:
    assert read_section(Config, AttrDict(SCHEMA.defaults)) == read_section(Config, {})
    assert (
        read_section(Config, {}).CHECKPOINT.keep_last == SCHEMA.defaults["CHECKPOINT"]["keep_last"]
    )
