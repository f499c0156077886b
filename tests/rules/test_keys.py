"""Every key of defaults.yaml is described, and the builder and the file agree on which keys a
section has."""

from importlib import resources
from typing import Any

import pytest
from omegaconf import OmegaConf

from phasetrain.config.schema import Schema, default_schema
from phasetrain.tasks.build.sections import DATA_KEYS, MODEL_KEYS, OPTIMIZER_KEYS, TRAIN_KEYS

RESUME = {"forbidden", "adjustable", "free"}


def leaves(node: Any, path: str = "") -> list[str]:
    """Return the dotted paths of all values that are no filled mapping."""
    if not isinstance(node, dict) or not node:
        return [path]
    return [
        leaf
        for key, value in node.items()
        for leaf in leaves(value, f"{path}.{key}" if path else key)
    ]


def own_keys(schema: Schema, section: str) -> set[str]:
    """Return the keys that defaults.yaml writes directly below a section."""
    return set(schema.children(section))


def test_every_key_has_type_class_and_meaning() -> None:
    schema = default_schema()
    text = resources.files("phasetrain.config").joinpath("defaults.yaml").read_text("utf-8")
    assert set(schema.keys) == set(leaves(OmegaConf.to_container(OmegaConf.create(text))))
    for key in schema.keys.values():
        assert key.type.fits(key.default), key.path
        assert key.resume in RESUME, key.path
        assert len(key.meaning) > 3, key.path


@pytest.mark.parametrize(
    "line",
    [
        "b: 1",
        "b: 1  # int",
        "b: 1  # int | free",
        "b: 1  # int | free |",
        "b: 1  # int | maybe | a number",
        "b: x  # int | free | a number",
    ],
)
def test_a_key_without_them_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        Schema(f"A:\n  {line}\n")


def test_sections_are_upper_case_and_keys_lower_case() -> None:
    for path, key in default_schema().keys.items():
        section, *names = path.split(".")
        assert section.isupper(), path
        labelled = key.type.text == "mapping"  # label -> part: a section below the section
        assert all(name.islower() or labelled or name in ("TRAIN", "TEST") for name in names), path


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("DATA.TRAIN", DATA_KEYS),
        ("DATA.TEST", DATA_KEYS - TRAIN_KEYS),
        ("MODEL", MODEL_KEYS),
        ("OPTIMIZER", OPTIMIZER_KEYS),
    ],
)
def test_the_builder_takes_out_just_the_keys_of_the_section(
    section: str, keys: frozenset[str]
) -> None:
    assert own_keys(default_schema(), section) == keys


@pytest.mark.parametrize("section", ["LOSS", "TASK"])
def test_other_sections_have_only_a_name(section: str) -> None:
    assert own_keys(default_schema(), section) == {"name"}


def test_a_key_that_the_builder_does_not_know_is_seen() -> None:
    schema = Schema(
        "OPTIMIZER:\n  name: sgd  # str | free | name\n  power: 1  # int | free | not taken out\n"
    )
    assert own_keys(schema, "OPTIMIZER") != OPTIMIZER_KEYS
