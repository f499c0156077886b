"""Conversion of VISSL's complete configs, which are stored as keys and values."""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.vissl import Migration, convert_vissl

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
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


@pytest.mark.feature(
    "vissl.meaning",
    "converted VISSL configs mean the same, or name a gap",
    "`benchmarks/vissl_configs.py`",
)
def test_transforms_heads_losses_and_modes_are_those_of_vissl(monkeypatch) -> None:
    """The benchmark compares learning rates, weight decays and loaded weights, too, in 15 minutes."""
    pytest.importorskip("PIL", reason="the extra `image` is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from vissl_configs import compare_config, make_reference

    configs = json.loads(gzip.decompress(FILE.read_bytes()))
    compared = 0
    for name, found in convert_all().items():
        if not found.missing:
            assert compare_config(make_reference(configs[name]), found) == [], name
            compared += 1
    assert compared == CONVERTED


def test_comparison_finds_what_differs(monkeypatch) -> None:
    pytest.importorskip("PIL", reason="the extra `image` is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from vissl_configs import compare_config, make_reference

    configs = json.loads(gzip.decompress(FILE.read_bytes()))
    name = "pretrain/swav/swav_8node_resnet.yaml"
    found = convert_all()[name]
    for key, value in (
        ("LOSS.swav_loss.epsilon", 0.5),
        ("LOSS.swav_loss.normalize_last_layer", False),
        (
            "MODEL.HEAD.PARAMS",
            [["swav_head", {"dims": [1, 2, 3], "use_bn": False, "num_clusters": [3]}]],
        ),
        ("DATA.TRAIN.TRANSFORMS", []),
        ("MODEL.FEATURE_EVAL_SETTINGS.EVAL_MODE_ON", True),
    ):
        given = {**configs[name], key: value}
        if key.endswith("EVAL_MODE_ON"):
            settings = "MODEL.FEATURE_EVAL_SETTINGS"
            given |= {f"{settings}.FREEZE_TRUNK_ONLY": True}
            given |= {f"{settings}.LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res5", ["Identity", []]]]}
        assert compare_config(make_reference(given), found), key
