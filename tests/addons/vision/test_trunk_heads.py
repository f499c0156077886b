"""A trunk with several heads: the input of each head, detached heads, and independent copies."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phasetrain
from phasetrain.addons.vision.trunk_heads import TrunkHeads
from phasetrain.models import MODELS
from phasetrain.models.base import MODELS as REGISTRY

IMAGES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TRUNK = {"name": "small_cnn", "width": 4, "cut": "head"}
LINEAR = {"name": "mlp", "hidden": []}


def make(section: Mapping[str, Any], where: str, own: Mapping[str, Any]) -> nn.Module:
    params = {key: value for key, value in section.items() if key != "name"}
    facts = {"classes": 10, "channels": 1, "input_shape": (1, 8, 8), **own}
    return REGISTRY.build(section["name"], params, where=where, facts=facts)


def made(heads: Mapping[str, Any], trunk: Mapping[str, Any] = TRUNK) -> TrunkHeads:
    torch.manual_seed(0)
    return TrunkHeads(trunk, heads, (1, 8, 8), make)


def test_heads_read_the_output_of_the_trunk() -> None:
    model = made({"digit": LINEAR, "parity": {**LINEAR, "classes": 2}}).eval()
    found = model(IMAGES)
    assert {label: tuple(one.shape) for label, one in found.items()} == {
        "digit": (5, 10),
        "parity": (5, 2),
    }
    features = model.trunk.features(IMAGES).mean((2, 3))
    torch.testing.assert_close(
        found["digit"], features @ model.heads["digit"].layers[1].weight.T + bias(model, "digit")
    )
    assert isinstance(model.trunk.head, nn.Identity)


def bias(model: TrunkHeads, label: str) -> torch.Tensor:
    return model.heads[label].layers[1].bias


@pytest.mark.feature("70")
def test_heads_read_layers_of_the_trunk() -> None:
    model = made(
        {
            "first": {**LINEAR, "from": "features.2", "pool": 2},
            "last": {**LINEAR, "from": "features.8"},
        }
    ).eval()
    assert model.heads["first"].layers[1].in_features == 4 * 2 * 2
    assert model.heads["last"].layers[1].in_features == 8 * 2 * 2
    found = model(IMAGES)
    pool_output = nn.functional.adaptive_avg_pool2d(model.trunk.features[:3](IMAGES), 2).flatten(1)
    torch.testing.assert_close(
        found["first"], pool_output @ model.heads["first"].layers[1].weight.T + bias(model, "first")
    )


def test_detached_head_gives_the_trunk_no_gradient() -> None:
    for detach in (False, True):
        model = made({"probe": {**LINEAR, "from": "features.2", "pool": 1, "detach": detach}})
        model(IMAGES)["probe"].square().sum().backward()
        assert (model.trunk.features[0].weight.grad is None) == detach
        assert model.heads["probe"].layers[1].weight.grad is not None


@pytest.mark.parametrize(
    ("trunk", "heads", "freeze", "told"),
    [
        ("small_cnn, width: 4, cut: head", "", "[]", True),
        ("small_cnn, width: 4, cut: head", "", "[trunk]", False),
        ("small_cnn, width: 4, cut: head", ", b: {name: mlp, hidden: []}", "[]", False),
        ("mlp", "", "[]", False),
    ],
)
def test_statistics_of_a_trunk_that_nothing_trains_are_warned_of(
    trunk: str, heads: str, freeze: str, told: bool, tmp_path: Path
) -> None:
    phasetrain.run(
        [
            *("DATA.TEST=null", "PHASES.updates=1", "METERS=null", "RUN.rehearse=false"),
            f"MODEL={{name: trunk_heads, trunk: {{name: {trunk}}}, heads: "
            f"{{a: {{name: mlp, hidden: [], detach: true}}{heads}}}, freeze: {freeze}}}",
            "LOSS={name: weighted_sum, losses: {a: {name: cross_entropy, output: a}}}",
            f"RUN.dir={tmp_path}",
        ]
    )
    log = (tmp_path / "log.txt").read_text()
    assert log.count("MODEL.heads: all heads have detach: true") == told


def test_heads_read_their_entries_of_the_input() -> None:
    model = made({"b": {**LINEAR, "input": "right"}, "a": {**LINEAR, "input": "left"}}).eval()
    left, right = IMAGES, IMAGES.flip(0)
    found = model({"left": left, "right": right})
    assert list(found) == ["b", "a"]
    torch.testing.assert_close(found["a"], model.heads["a"](model.trunk(left)))
    torch.testing.assert_close(found["b"], model.heads["b"](model.trunk(right)))


def test_heads_without_their_entry_are_skipped_in_tests_only() -> None:
    model = made({"b": {**LINEAR, "input": "right"}, "a": {**LINEAR, "input": "left"}})
    with pytest.raises(ValueError, match=r"MODEL\.heads\.b\.input = 'right'"):
        model({"left": IMAGES})
    assert list(model.eval()({"left": IMAGES})) == ["a"]


def test_copy_is_independent() -> None:
    model = made({"probe": {**LINEAR, "from": "features.2", "pool": 1}}).eval()
    copy = deepcopy(model)
    before = model(IMAGES)["probe"]
    with torch.no_grad():
        copy.trunk.features[0].weight.zero_()
    assert not torch.equal(copy(IMAGES)["probe"], before)
    assert torch.equal(model(IMAGES)["probe"], before)
    assert model._taken == {}


def test_building_does_not_change_running_statistics() -> None:
    model = made({"digit": LINEAR})
    assert model.trunk.features[1].running_mean.tolist() == [0.0] * 4
    assert model.trunk.training


@pytest.mark.parametrize(
    ("heads", "trunk", "message"),
    [
        ({}, TRUNK, "heads = {}:"),
        (
            {"a": {**LINEAR, "from": "features.12"}},
            TRUNK,
            r"heads\.a\.from = 'features\.12':",
        ),
        ({"a": LINEAR}, {**TRUNK, "cut": "heed"}, r"trunk\.cut = 'heed'.*'head'"),
        ({"a": {**LINEAR, "pool": 2}}, TRUNK, r"trunk\.cut.*\(1, 8, 8\)"),
    ],
)
def test_bad_parameters_are_rejected(
    heads: Mapping[str, Any], trunk: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(heads, trunk)


def test_inputs_without_the_entries_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"MODEL\.heads\.digit\.input"):
        made({"digit": LINEAR})({"left": IMAGES})
    with pytest.raises(ValueError, match=r"MODEL\.heads\.digit\.input = 'left':.*\blift\b"):
        made({"digit": {**LINEAR, "input": "left"}})({"lift": IMAGES})


def test_model_is_registered() -> None:
    assert MODELS["trunk_heads"] is TrunkHeads


@pytest.mark.feature("model.pooling")
def test_several_layers_are_pooled_and_concatenated() -> None:
    heads = {"both": {**LINEAR, "from": ["features.2", "features.8"], "pool": [2, 1]}}
    model = made(heads).eval()
    first = model.trunk.features[:3](IMAGES)
    last = model.trunk.features[:9](IMAGES)
    pooled = [nn.functional.adaptive_avg_pool2d(one, (2, 1)) for one in (first, last)]
    expected = model.heads["both"](torch.cat(pooled, 1))
    assert torch.equal(model(IMAGES)["both"], expected)


def test_norm_of_the_trunk_is_applied_to_each_layer() -> None:
    heads = {"probe": {**LINEAR, "from": "features.5", "norm": "features.4"}}
    model = made(heads).eval()
    normed = model.trunk.features[4](model.trunk.features[:6](IMAGES))
    assert torch.equal(model(IMAGES)["probe"], model.heads["probe"](normed))


def test_unknown_norm_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"heads\.probe\.norm = 'feature\.4'"):
        made({"probe": {**LINEAR, "norm": "feature.4"}})
