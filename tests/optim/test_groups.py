"""Rules give groups of weights their own options."""

import pytest
import torch
from raising import raises
from torch import nn

from phasetrain.errors import ConfigError
from phasetrain.optim.groups import (
    Group,
    check_options,
    group_weights,
    list_weights,
    split_by_note,
    tabulate,
)


def model() -> nn.Module:
    trunk = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
    return nn.ModuleDict({"stem": nn.Conv2d(1, 1, 1), "trunk": trunk, "head": nn.Linear(2, 3)})


def plain(groups: list[Group]) -> list[tuple[dict[str, object], list[str]]]:
    return [(group.options, [weight.name for weight in group.weights]) for group in groups]


WEIGHTS = list_weights(model())
NAMES = [
    "stem.weight", "stem.bias", "trunk.0.weight", "trunk.0.bias", "trunk.1.weight", "trunk.1.bias",
    "trunk.2.weight", "trunk.2.bias", "head.weight", "head.bias",
]  # fmt: skip


def test_weights_are_listed_once_with_their_modules() -> None:
    assert [weight.name for weight in WEIGHTS] == NAMES
    assert [weight.kind for weight in WEIGHTS[4:7]] == ["BatchNorm2d", "BatchNorm2d", "Conv2d"]
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight  # type: ignore[union-attr]
    tied["a"].bias.requires_grad_(False)  # type: ignore[union-attr]
    assert [weight.name for weight in list_weights(tied)] == ["a.weight"]


def test_weights_without_rules_are_one_group() -> None:
    assert plain(group_weights(WEIGHTS, [], lr=0.1)) == [({}, NAMES)]


def test_rule_of_max_ndim_selects_norms_and_biases() -> None:
    rules = [{"max_ndim": 1, "weight_decay": 0.0}]
    matrices = [name for name in NAMES if name.endswith("weight") and name != "trunk.1.weight"]
    others = [name for name in NAMES if name not in matrices]
    assert plain(group_weights(WEIGHTS, rules, lr=0.1)) == [
        ({}, matrices),
        ({"weight_decay": 0.0}, others),
    ]


def test_schedules_of_rules_divide_groups_and_later_ones_win() -> None:
    rules = [
        {"match": "head.*", "SCHEDULES": {"lr": "cosine", "weight_decay": "linear"}},
        {"match": "*.bias", "SCHEDULES": {"lr": "constant"}, "lr_scale": 2.0},
    ]
    groups = group_weights(WEIGHTS, rules, lr=0.1)
    found = [(group.schedules, len(group.weights), group.options) for group in groups]
    cosine, constant = ("OPTIMIZER.groups[0]", "cosine"), ("OPTIMIZER.groups[1]", "constant")
    linear = ("OPTIMIZER.groups[0]", "linear")
    assert found == [
        ({}, 4, {}),
        ({"lr": constant}, 4, {"lr": 0.2}),
        ({"lr": cosine, "weight_decay": linear}, 1, {}),
        ({"lr": constant, "weight_decay": linear}, 1, {"lr": 0.2}),
    ]
    assert [row[0] for row in tabulate(groups)][2:] == [
        "defaults, lr with its own schedule, weight_decay with its own schedule",
        "lr 0.2, lr with its own schedule, weight_decay with its own schedule",
    ]
    divided = split_by_note(groups, {id(groups[2].weights[0].parameter): "frozen for 1 epoch"})
    assert [group.schedules for group in divided] == [group.schedules for group in groups]


@pytest.mark.parametrize(
    ("schedules", "key"),
    [
        (3, "OPTIMIZER.groups[0].SCHEDULES"),
        ({"lrr": "cosine"}, "OPTIMIZER.groups[0].SCHEDULES.lrr"),
    ],
)
def test_wrong_schedules_of_a_rule_are_rejected(schedules: object, key: str) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with raises(ConfigError, key=key):
        rules = [{"match": "head.*", "SCHEDULES": schedules}]
        check_options(group_weights(WEIGHTS, rules, lr=0.1), optimizer)


@pytest.mark.feature(
    "53",
    "parameter groups by name, type or dimension; layer-wise decay",
    "`OPTIMIZER.groups`, `OPTIMIZER.layer_decay`",
)
def test_rules_are_combined_and_later_ones_win() -> None:
    rules = [
        {"match": "head.*", "lr_scale": 10.0, "weight_decay": 0.1},
        {"match": ["*.bias", "nothing*bias"][:1], "weight_decay": 0.0, "lr_scale": 2.0},
        {"types": ["Batch*d"], "momentum": 0.5},
    ]
    found = {
        name: group.options
        for group in group_weights(WEIGHTS, rules, lr=0.1)
        for name in [w.name for w in group.weights]
    }
    assert found["head.weight"] == {"weight_decay": 0.1, "lr": 1.0}
    assert found["head.bias"] == {"weight_decay": 0.0, "lr": 2.0}
    assert found["trunk.1.weight"] == {"momentum": 0.5}
    assert found["trunk.1.bias"] == {"weight_decay": 0.0, "momentum": 0.5, "lr": 0.2}
    assert found["stem.weight"] == {}


def test_selectors_of_one_rule_must_all_hold() -> None:
    [_, group] = group_weights(
        WEIGHTS, [{"match": "trunk.*", "types": "Conv2d", "max_ndim": 1, "lr": 0.5}], lr=0.1
    )
    assert plain([group]) == [({"lr": 0.5}, ["trunk.0.bias", "trunk.2.bias"])]


def test_layer_decay_lowers_the_rate_of_earlier_layers() -> None:
    found = {
        w.name: group.options.get("lr", 0.1)
        for group in group_weights(WEIGHTS, [], lr=0.1, layer_decay=0.5)
        for w in group.weights
    }
    assert found == pytest.approx(
        {
            name: 0.1
            * 0.5
            ** {"stem": 4, "trunk.0": 3, "trunk.1": 2, "trunk.2": 1, "head": 0}[
                name.rpartition(".")[0]
            ]
            for name in NAMES
        }
    )


def test_groups_are_accepted_by_an_optimizer() -> None:
    groups = group_weights(WEIGHTS, [{"match": "head.*", "lr_scale": 0.5}], lr=0.4)
    optimizer = torch.optim.SGD([group.to_param_group() for group in groups], lr=0.4, momentum=0.9)
    assert [
        (group["lr"], group["momentum"], len(group["params"])) for group in optimizer.param_groups
    ] == [
        (0.4, 0.9, 8),
        (0.2, 0.9, 2),
    ]


def test_table_lists_options_and_weights() -> None:
    rows = list(tabulate(group_weights(WEIGHTS, [{"match": "head.*", "lr_scale": 0.5}], lr=0.4)))
    assert rows[0][:2] == ("defaults", "8")
    assert rows[1] == ("lr 0.2", "2", "9", "head.weight, head.bias")


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (
            {"match": "heads.*", "lr": 1.0},
            r"OPTIMIZER\.groups\[0\]\.match = 'heads\.\*' .*\b10\b.*'head'",
        ),
        (
            {"types": "BatchNorm1d", "lr": 1.0},
            r"types = 'BatchNorm1d'.*'BatchNorm2d'",
        ),
        ({"lr": 1.0}, r"groups\[0\].*match, types, max_ndim"),
        ({"match": "head.*"}, r"groups\[0\].*lr_scale"),
        ({"match": "head.*", "types": "Conv2d", "lr": 1.0}, r"groups\[0\].*Conv2d"),
        ({"max_ndim": 1, "lr_scale": "abc"}, r"groups\[0\].lr_scale = 'abc':"),
        ({"match": "*", "lr_scale": -1}, "lr_scale = -1:"),
        ({"max_ndim": "x", "lr": 1.0}, "max_ndim = 'x':"),
        ({"match": 3, "lr": 1.0}, "match = 3:"),
    ],
)
def test_bad_rules_are_rejected(rule: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        group_weights(WEIGHTS, [rule], lr=0.1)


@pytest.mark.parametrize(
    "option", [{"weight_decay": "abc"}, {"weight_decay": -1}, {"lr": "x"}, {"momentum": True}]
)
def test_option_of_the_wrong_type_is_rejected_before_the_first_step(
    option: dict[str, object],
) -> None:
    groups = group_weights(WEIGHTS, [{"match": "*", **option}], lr=0.1)
    optimizer = torch.optim.SGD(
        [group.to_param_group() for group in group_weights(WEIGHTS, [], lr=0.1)], lr=0.1
    )
    with raises(ConfigError, key="OPTIMIZER.groups"):
        check_options(groups, optimizer)


def test_rule_that_selects_frozen_weights_alone_has_no_effect() -> None:
    net = model()
    net.requires_grad_(False)
    net.head.weight.requires_grad_(True)
    trained, frozen = list_weights(net), list_weights(net, trained=False)
    assert [weight.name for weight in trained] == ["head.weight"]
    assert len(frozen) == len(NAMES) - 1
    for rule in ({"max_ndim": 1, "weight_decay": 0.0}, {"match": "head.bias", "lr": 1.0}):
        assert plain(group_weights(trained, [rule], lr=0.1, frozen=frozen)) == [
            ({}, ["head.weight"])
        ]
        with pytest.raises(ConfigError, match=r"groups\[0\]"):
            group_weights(trained, [rule], lr=0.1)
    with pytest.raises(ConfigError, match="haed"):
        group_weights(trained, [{"match": "haed.*", "lr": 1.0}], lr=0.1, frozen=frozen)
