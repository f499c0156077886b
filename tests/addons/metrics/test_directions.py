"""Names and directions of the metrics, which monitors use."""

from typing import Any

import pytest

from phasetrain.errors import ConfigError
from phasetrain.hooks.monitors.monitor import first_metric
from phasetrain.meters import METERS


@pytest.mark.parametrize(
    ("meter", "monitor"),
    [
        ("present_accuracy", "dev/mine_accuracy"),
        ("regression", "-dev/mine_mse"),
        ("auroc", "dev/mine_mean"),
    ],
)
def test_the_first_metric_has_its_sign(meter: str, monitor: str) -> None:
    assert first_metric("dev", {"mine": METERS[meter]}) == monitor


@pytest.mark.parametrize("meter", ["confusion_matrix", "precision_at_k"])
def test_a_first_metric_that_depends_on_data_has_to_be_named(meter: str) -> None:
    with pytest.raises(ConfigError, match=r"METERS\.mine"):
        first_metric("test", {"mine": METERS[meter]})


def test_values_of_one_meter_have_their_own_directions() -> None:
    assert METERS.build("regression").direction("mae") == "smaller"
    assert METERS.build("regression").direction("r2") == "larger"
    assert METERS.build("f1", {"classes": 3}).direction("absent") is None


@pytest.mark.parametrize(
    ("meter", "params", "names"),
    [
        ("f1", {"classes": 3}, ("macro", "micro", "absent")),
        ("precision_at_k", {"topk": [1, 5]}, ("1", "5")),
        ("auroc", {}, ("mean", "absent")),
        ("auroc", {"per_class": True}, None),
    ],
)
def test_names_are_known_before_there_is_data(
    meter: str, params: dict[str, Any], names: tuple[str, ...] | None
) -> None:
    assert METERS.build(meter, params).metric_names() == names
