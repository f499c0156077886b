"""Conversion of VISSL's complete configs, which are stored as keys and values."""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.vissl import Migration, convert_vissl

FILE = Path(__file__).parents[2] / "data" / "vissl" / "configs.json.gz"
CONVERTED = 195
"""Configs without a missing key, also named in docs/addons/vissl.md."""


@cache
def convert_all() -> dict[str, Migration]:
    configs = json.loads(gzip.decompress(FILE.read_bytes()))
    return {name: convert_vissl(VisslConfig(given)) for name, given in configs.items()}


@pytest.mark.feature("vissl")
def test_complete_configs_convert(request) -> None:
    found = convert_all()
    assert len(found) == 211
    assert sum(not one.missing for one in found.values()) == CONVERTED
    page = (request.config.rootpath / "docs" / "addons" / "vissl.md").read_text("utf-8")
    assert f"211 complete configs, {CONVERTED} convert" in page


def test_every_key_is_reported_and_every_gap_has_a_reason() -> None:
    configs = json.loads(gzip.decompress(FILE.read_bytes()))
    for name, found in convert_all().items():
        assert [one.key for one in found.keys] == list(configs[name])
        assert all(one.text for one in found.keys), name
        missing = [one.key for one in found.missing]
        assert not any("not converted in this config" in one.text for one in found.missing), missing


def test_misspelt_keys_of_vissl_are_named() -> None:
    words = Counter(
        one.key for found in convert_all().values() for one in found.keys if "spelling" in one.text
    )
    assert set(words) <= {"DISTRIBUTED.DISTR_ON", "LOSS.swav_loss.embedding"}
