"""Heads, and models of a trunk and a head, which accept lists of views."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from phasetrain.addons.vision.trunk_head import ProjectionHead, PrototypeHead, TrunkHead
from phasetrain.errors import ConfigError
from phasetrain.models import HEADS, MODELS, Embedding

CNN = {"name": "small_cnn", "width": 4, "cut": "head"}
HEAD = {"name": "projection", "hidden": [6], "dimensions": 5}


def model(**given: object) -> TrunkHead:
    torch.manual_seed(0)
    params = {"trunk": CNN, "head": HEAD, **given}
    known = {"input_shape": (1, 8, 8), "channels": 1, "classes": 10}

    def make(section: Mapping[str, Any], where: str, facts: Mapping[str, Any]) -> nn.Module:
        rest = {key: value for key, value in section.items() if key != "name"}
        return MODELS.build(section["name"], rest, where=where, facts={**known, **facts})

    facts = {**known, "make_model": make}
    found = MODELS.build("trunk_head", params, where="MODEL", facts=facts)
    assert isinstance(found, TrunkHead)
    return found


def test_sizes_are_derived_from_trunk_and_head() -> None:
    made = model()
    assert (made.features, made.dimensions) == (8, 5)
    assert isinstance(made.trunk.head, nn.Identity)
    assert made.trunk(torch.zeros(2, 1, 8, 8)).shape == (2, 8)
    assert made(torch.zeros(3, 1, 8, 8)).shape == (3, 5)
    assert isinstance(made, Embedding)
    assert not isinstance(nn.Linear(2, 2), Embedding)


def test_trunk_without_a_cut_keeps_its_last_layer() -> None:
    assert model(trunk={"name": "small_cnn"}).features == 10


def test_building_does_not_change_running_statistics() -> None:
    assert model().trunk.features[1].num_batches_tracked.item() == 0


def test_views_of_equal_shape_are_one_batch_of_the_trunk() -> None:
    made = model().eval()
    calls: list[tuple[int, ...]] = []
    made.trunk.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape)))
    views = [torch.randn(3, 1, size, size) for size in (8, 8, 6, 6, 6)]
    found = made(views)
    assert calls == [(6, 1, 8, 8), (9, 1, 6, 6)]
    assert [tuple(one.shape) for one in found] == [(3, 5)] * 5
    for view, embedding in zip(views, found, strict=True):
        torch.testing.assert_close(made(view), embedding)


def test_teacher_is_a_copy_without_the_predictor() -> None:
    made = model(predictor={"name": "projection", "hidden": [7]})
    teacher = made.as_teacher()
    assert isinstance(made.predictor, ProjectionHead)
    inputs = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(teacher.eval()(inputs), made.eval().head(made.trunk(inputs)))
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in made.parameters()}


def test_prototype_head_returns_cosine_similarities() -> None:
    head = PrototypeHead(3, dimensions=7, hidden=[4], bottleneck=2)
    features = torch.randn(5, 3)
    expected = torch.cosine_similarity(head.layers(features)[:, None], head.prototypes[None], dim=2)
    torch.testing.assert_close(head(features), expected)


def test_prototype_head_has_the_layers_of_swav_on_request() -> None:
    head = PrototypeHead(3, dimensions=7, hidden=[4], bottleneck=2, batch_norm=True)
    assert set(head.state_dict()) >= {"layers.0.bias", "layers.1.running_mean", "layers.3.bias"}
    assert isinstance(head.layers[2], nn.ReLU)


def test_projection_can_have_batch_norm() -> None:
    head = HEADS.build(
        "projection", {"features": 3, "dimensions": 2, "hidden": [4], "batch_norm": True}
    )
    assert [type(layer) for layer in head.children()] == [
        nn.Linear,
        nn.BatchNorm1d,
        nn.ReLU,
        nn.Linear,
    ]
    found = ProjectionHead(3, 2, last_batch_norm=True)(torch.randn(50, 3))
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(2), atol=1e-6, rtol=0)


def test_last_layer_of_a_projection_can_be_like_a_hidden_one_or_have_no_bias() -> None:
    head = ProjectionHead(3, 2, hidden=[4], batch_norm=True, last_hidden=True)
    last = list(head.children())[3:]
    assert [type(layer) for layer in last] == [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert last[1].affine
    assert last[0].bias is None
    assert ProjectionHead(3, 2, last_bias=False)[0].bias is None
    assert isinstance(ProjectionHead(3, 2, [4], activation="none")[1], nn.Identity)


def test_scores_of_prototypes_can_have_trained_scales() -> None:
    head = PrototypeHead(3, dimensions=7, hidden=[4], bottleneck=2, trained_scale=True)
    features = torch.randn(5, 3)
    cosines = head(features)
    assert head.scales is not None
    assert head.scales.shape == (7, 1)
    with torch.no_grad():
        head.scales[2] = 3.0
    factors = torch.tensor([1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(head(features), cosines * factors)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"trunk": {**CNN, "cut": "haed"}},
            "trunk.cut = 'haed': .*'head'",
        ),
        ({"trunk": {"width": 4}}, "trunk.name:"),
        (
            {"trunk": {"name": "small_cn"}},
            "MODEL.trunk.name = 'small_cn': .*'small_cnn'",
        ),
        ({"trunk": {**CNN, "widht": 4}}, "MODEL.trunk.widht: .*'width'"),
        (
            {"head": {"name": "projektion"}},
            "MODEL.head.name = 'projektion': .*'projection'",
        ),
        ({"head": {**HEAD, "hiden": [3]}}, "MODEL.head.hiden: .*'hidden'"),
        (
            {"trunk": {"name": "torch.nn.Identity"}},
            r"MODEL\.trunk .*\(2, 1, 8, 8\)",
        ),
        (
            {"trunk": {**CNN, "channels": 3}},
            r"MODEL\.trunk .*\(1, 8, 8\)",
        ),
    ],
)
def test_bad_parameters_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(**given)
