"""Every option under configs/ composes."""

import pytest

from phasetrain.config.compose import compose
from phasetrain.config.sources import ConfigFiles

FILES = ConfigFiles()
GROUPS = ("experiment", "LOSS", "MODEL", "OPTIMIZER")
OPTIONS = [(group, option) for group in GROUPS for option in FILES.options(group)]


def test_there_are_options_in_each_group() -> None:
    assert {group for group, _ in OPTIONS} == set(GROUPS)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_it_composes(group: str, option: str) -> None:
    found = compose([f"{group}={option}"])
    assert found.problems == ()
    assert f"{group}/{option}.yaml" in found.layers
