"""Targets that do not count: each meter of classes skips them, or rejects them at the end."""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS, Meter
from phasetrain.runs.direction import COUNTS
from phasetrain.tasks.metering import compute_metrics, update_meters

IGNORED = -100

# Four samples that count, of which the third is wrong, and two that do not.
SCORES = torch.tensor(
    [
        [0.7, 0.2, 0.1],
        [0.1, 0.8, 0.1],
        [0.6, 0.15, 0.25],
        [0.1, 0.6, 0.3],
        [0.3, 0.3, 0.4],
        [0.2, 0.1, 0.7],
    ]
)
CLASSES = (SCORES, torch.tensor([0, IGNORED, 2, 1, IGNORED, 2]))
# One image of six pixels.
PIXELS = (SCORES.T[None], CLASSES[1][None])
# Seven labels that count, of which the second of the second sample and the last are wrong.
LABELS = (
    torch.tensor([[2.0, -1.0, 5.0], [-1.0, -2.0, 3.0], [4.0, 4.0, 4.0], [1.0, 9.0, 2.0]]),
    torch.tensor([[1, 0, IGNORED], [0, 1, 1], [IGNORED, IGNORED, IGNORED], [1, IGNORED, 0]]),
)
BINARY = (torch.tensor([2.0, -1.0, 3.0, 1.0]), torch.tensor([1.0, 0.0, IGNORED, 0.0]))
GROUPS = (
    torch.tensor([0.9, 0.2, 0.8, 0.1, 0.5]),
    {
        "label": torch.tensor([1, 0, IGNORED, 1, 0]),
        "group": torch.tensor([0, 0, 0, 1, 1]),
    },
)
LOSS_FACTS = {"classes": 3, "token_bytes": [1, 2, 4], "ignore_index": IGNORED}

# meter, parameters, outputs and targets, metrics
CASES: list[tuple[str, dict[str, Any], Any, dict[str, float]]] = [
    ("accuracy", {}, CLASSES, {"m": 3 / 4}),
    ("accuracy", {"topk": 2}, CLASSES, {"m": 1.0}),
    ("present_accuracy", {}, CLASSES, {"m_accuracy": 3 / 4, "m_absent": 0}),
    ("per_class_accuracy", {}, CLASSES, {"m_mean": 5 / 6, "m_of_1": 1, "m_of_2": 1 / 2}),
    ("per_class_accuracy", {"classes": 2}, BINARY, {"m_of_0": 1 / 2, "m_of_1": 1}),
    ("precision_at_k", {"topk": [1, 2]}, CLASSES, {"m_1": 3 / 4, "m_2": 4 / 8}),
    ("precision_at_k", {}, LABELS, {"m_1": 2 / 3}),
    ("recall_at_k", {"topk": [1, 2]}, CLASSES, {"m_1": 3 / 4, "m_2": 1}),
    ("recall_at_k", {}, LABELS, {"m_1": 2 / 4}),
    ("f1", {}, CLASSES, {"m_macro": 7 / 9, "m_micro": 3 / 4}),
    ("f1", {}, LABELS, {"m_macro": 5 / 9, "m_micro": 3 / 4}),
    ("f1", {"classes": 2}, BINARY, {"m_macro": 2 / 3, "m_micro": 2 / 3}),
    ("confusion_matrix", {}, CLASSES, {"m_of_0": 1, "m_of_1": 1, "m_of_2": 1}),
    ("auroc", {"logits": False}, CLASSES, {"m_mean": 11 / 12}),
    ("auroc", {}, LABELS, {"m_mean": 2 / 3}),
    ("auroc", {}, BINARY, {"m_mean": 1}),
    ("average_precision", {"logits": False}, CLASSES, {"m_mean": 17 / 18}),
    ("average_precision", {}, LABELS, {"m_mean": 5 / 6}),
    ("multilabel_accuracy", {}, LABELS, {"m_labels": 5 / 7, "m_exact": 1 / 3}),
    ("grouped_auroc", {}, GROUPS, {"m_mean": 1 / 2, "m_groups": 2}),
    ("mean_iou", {}, PIXELS, {"m_mean": 2 / 3}),
    ("dice", {}, PIXELS, {"m_mean": 7 / 9}),
    ("pixel_accuracy", {}, PIXELS, {"m": 3 / 4}),
    ("bits_per_byte", {}, CLASSES, {"m": 4 / 11}),  # four bits for 1 + 4 + 2 + 4 bytes
    ("torchmetrics.Accuracy", {"task": "multiclass", "average": "micro"}, CLASSES, {"m": 3 / 4}),
    ("torchmetrics.Accuracy", {"task": "multiclass", "top_k": 2}, CLASSES, {"m": 1}),
    ("torchmetrics.AUROC", {"task": "multiclass"}, CLASSES, {"m": 11 / 12}),
]
OF_ADDONS = {
    **dict.fromkeys(
        (
            *("present_accuracy", "per_class_accuracy", "precision_at_k", "recall_at_k", "f1"),
            *("confusion_matrix", "auroc", "average_precision", "multilabel_accuracy"),
            "grouped_auroc",
        ),
        "metrics",
    ),
    "mean_iou": "vision",
    "dice": "vision",
    "pixel_accuracy": "vision",
    "bits_per_byte": "text",
    "present_accuracy": "metrics",
    "torchmetrics.Accuracy": "libraries",
    "torchmetrics.AUROC": "libraries",
}
"""Meter -> the add-on that has it."""
OWN = [case for case in CASES if not case[0].startswith("torchmetrics.")]


def as_params(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return cases that are skipped without the add-on of their meter."""
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{number}",
            marks=[pytest.mark.addon(OF_ADDONS[case[0]])] if case[0] in OF_ADDONS else [],
        )
        for number, case in enumerate(cases)
    ]


def measure(meter: Meter, output: Tensor, target: Any) -> dict[str, float]:
    """Return the metrics of a meter with the label `m` after it has seen one step of four bits."""
    loss = torch.tensor(math.log(2), dtype=torch.float64)
    meters = {"m": meter}
    update_meters(meters, {}, StepOutput(loss, 4.0, len(output), output, target))
    return compute_metrics(meters, World())


@pytest.mark.addon
def test_each_meter_of_classes_is_in_the_table() -> None:
    own = {
        name
        for name, part in METERS.items()
        if "ignore_index" in inspect.signature(part).parameters
        and part.__module__.startswith("phasetrain.")
    }
    assert own == {name for name, *_ in OWN}


@pytest.mark.feature(
    "meters.ignored_targets",
    "targets that the loss ignores count in no metric; other targets outside the classes are "
    "an error",
    "`METERS.x.ignore_index`, by default that of the loss",
)
@pytest.mark.parametrize(("name", "params", "seen", "expected"), as_params(CASES))
def test_ignored_targets_do_not_count(
    name: str, params: dict[str, Any], seen: tuple[Tensor, Any], expected: dict[str, float]
) -> None:
    meter = METERS.build(name, params, where="METERS.m", facts=LOSS_FACTS)
    metrics = measure(meter, *seen)
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "metric"),
    as_params(
        [
            ("accuracy", "m"),
            ("present_accuracy", "m_accuracy"),
            ("per_class_accuracy", "m_mean"),
            ("mean_iou", "m_mean"),
            ("pixel_accuracy", "m"),
        ]
    ),
)
def test_uint8_targets_count_like_int64(name: str, metric: str) -> None:
    scores = torch.eye(256)[[156, 255, 0, 3]]
    target = torch.tensor([156, 255, 0, 4], dtype=torch.uint8)  # 156 is -100 modulo 256
    seen = (
        (scores.T[None], target[None])
        if name in ("mean_iou", "pixel_accuracy")
        else (scores, target)
    )
    meter = METERS.build(name, facts=LOSS_FACTS | {"classes": 256})
    expected = {"mean_iou": 3 / 5}.get(name, 3 / 4)
    assert measure(meter, *seen)[metric] == pytest.approx(expected)


@pytest.mark.feature("meters.ignored_targets")
@pytest.mark.parametrize(("name", "params", "seen"), as_params(case[:3] for case in OWN))
def test_other_targets_outside_the_classes_are_rejected(
    name: str, params: dict[str, Any], seen: tuple[Tensor, Any]
) -> None:
    # A parameter of the config comes before the class that the loss ignores.
    meter = METERS.build(name, params | {"ignore_index": None}, facts=LOSS_FACTS)
    code = "data.label_outside_classes"
    if name == "bits_per_byte":  # it has no number of bytes to go on with
        code = "config.misfit"
    with raises(ConfigError, code=code, key="METERS.m") as caught:
        measure(meter, *seen)
    if name == "accuracy":
        assert caught.match(r"attribute ignore_index .* METERS\.\*\.ignore_index")


@pytest.mark.parametrize(
    ("name", "params", "seen"),
    as_params(case[:3] for case in OWN if case[0] != "bits_per_byte"),
)
def test_phase_of_ignored_targets_has_no_metric(
    name: str, params: dict[str, Any], seen: tuple[Tensor, Any]
) -> None:
    meter = METERS.build(name, params, facts=LOSS_FACTS)
    output, target = seen
    if isinstance(target, dict):
        target = target | {"label": torch.full_like(target["label"], IGNORED)}
    else:
        target = torch.full_like(target, IGNORED)
    metrics = measure(meter, output, target)
    assert {key for key in metrics if key.removeprefix("m_") not in COUNTS} == set()


@pytest.mark.parametrize("name", as_params([("accuracy",), ("auroc",), ("grouped_auroc",)]))
def test_state_of_an_earlier_version_is_loaded(name: str) -> None:
    seen = GROUPS if name == "grouped_auroc" else CLASSES
    meter = METERS.build(name, facts=LOSS_FACTS)
    measure(meter, *seen)
    state = meter.state_dict()
    del state["outside"]
    if "labels" in state:
        state["labels"] = state["labels"] > 0
    restored = METERS.build(name, facts=LOSS_FACTS)
    restored.load_state_dict(state)
    assert {key: value.dtype for key, value in restored.state_dict().items()} == {
        key: value.dtype for key, value in meter.state_dict().items()
    }
    assert int(restored.get_buffer("outside")) == 0
