"""Heads, and the model of a trunk and a head that takes lists of views."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from phasetrain.errors import ConfigError
from phasetrain.models import HEADS, MODELS, Embedding, TrunkHead
from phasetrain.models.heads import ProjectionHead, PrototypeHead

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


def test_sizes_follow_from_the_trunk_and_the_head() -> None:
    made = model()
    assert (made.features, made.dimensions) == (8, 5)
    assert isinstance(made.trunk.head, nn.Identity)
    assert made.trunk(torch.zeros(2, 1, 8, 8)).shape == (2, 8)
    assert made(torch.zeros(3, 1, 8, 8)).shape == (3, 5)
    assert isinstance(made, Embedding)
    assert not isinstance(nn.Linear(2, 2), Embedding)


def test_a_trunk_may_stay_whole() -> None:
    assert model(trunk={"name": "small_cnn"}).features == 10


def test_building_leaves_running_statistics_alone() -> None:
    assert model().trunk.features[1].num_batches_tracked.item() == 0


def test_views_of_one_shape_go_through_the_trunk_at_once() -> None:
    made = model().eval()
    calls: list[tuple[int, ...]] = []
    made.trunk.register_forward_pre_hook(lambda module, args: calls.append(tuple(args[0].shape)))
    views = [torch.randn(3, 1, size, size) for size in (8, 8, 6, 6, 6)]
    found = made(views)
    assert calls == [(6, 1, 8, 8), (9, 1, 6, 6)]
    assert [tuple(one.shape) for one in found] == [(3, 5)] * 5
    for view, embedding in zip(views, found, strict=True):
        torch.testing.assert_close(made(view), embedding)


def test_a_teacher_is_a_copy_without_predictor() -> None:
    made = model(predictor={"name": "projection", "hidden": [7]})
    teacher = made.as_teacher()
    assert isinstance(made.predictor, ProjectionHead)
    inputs = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(teacher.eval()(inputs), made.eval().head(made.trunk(inputs)))
    assert not {id(p) for p in teacher.parameters()} & {id(p) for p in made.parameters()}


def test_prototypes_give_cosines() -> None:
    head = PrototypeHead(3, dimensions=7, hidden=[4], bottleneck=2)
    features = torch.randn(5, 3)
    expected = torch.cosine_similarity(head.layers(features)[:, None], head.prototypes[None], dim=2)
    torch.testing.assert_close(head(features), expected)


def test_batch_norm_of_a_projection() -> None:
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"trunk": {**CNN, "cut": "haed"}},
            "trunk.cut = 'haed': .*no module of this name; did you mean 'he",
        ),
        ({"trunk": {"width": 4}}, "trunk.name: required"),
        (
            {"trunk": {"name": "small_cn"}},
            "MODEL.trunk.name = 'small_cn': .*did you mean 'small_cnn'",
        ),
        ({"trunk": {**CNN, "widht": 4}}, "MODEL.trunk.widht: .*did you mean 'width'"),
        (
            {"head": {"name": "projektion"}},
            "MODEL.head.name = 'projektion': no head .*did you mean 'projection'",
        ),
        ({"head": {**HEAD, "hiden": [3]}}, "MODEL.head.hiden: .*did you mean 'hidden'"),
        (
            {"trunk": {"name": "torch.nn.Identity"}},
            r"MODEL.trunk returns .* \(2, 1, 8, 8\) for 2 samples",
        ),
        (
            {"trunk": {**CNN, "channels": 3}},
            r"MODEL.trunk rejects .* \(1, 8, 8\)",
        ),
    ],
)
def test_what_it_refuses(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(**given)
