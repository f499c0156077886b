"""Configs are written as OmegaConf writes them."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from phasetrain.config.compose.composed import compose
from phasetrain.config.yaml_text import write_yaml

LIST = [1, "2"]


@pytest.mark.parametrize(
    "values",
    [
        compose([]).config,
        {"a": LIST, "b": {"c": LIST}, "d": {}, "e": []},  # the same list twice: no alias
        {"texts": ["", "1", "1.5", "1e3", "yes", "null", "~", "é", "\U0001f600", "a: b", "two\nlines", "'", "${x}"]},
        {"numbers": [1, -1.5, 1e-05, 1e20, float("inf"), float("-inf"), True, None], 3: "key"},
        {"long": "word " * 40},
        ["OPTIMIZER.lr=0.1", "RUN.dir='a b'"],
        [],
    ],
)  # fmt: skip
def test_text_is_that_of_omegaconf(values: Any) -> None:
    assert write_yaml(values) == OmegaConf.to_yaml(OmegaConf.create(values))
