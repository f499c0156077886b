"""Two states are equal when their bits are; the first difference of two runs is named with its cause."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from phasetrain.proof.causes import explain
from phasetrain.proof.compare import (
    Difference,
    count_changed,
    differences,
    find_difference,
    find_first_update,
    is_equal,
)
from phasetrain.proof.digest import digest_leaves
from phasetrain.proof.trace import Trace
from phasetrain.runs.ledger import Ledger, LedgerRecord, encode_ledger, parse_ledger

RECORD = LedgerRecord(1, 0, 1, 4, 0, 7, 0, 9, 0.5, 0.0, 0.1)


def trace(**moments: str) -> Trace:
    recorded = Trace()
    recorded.steps = {(0, 1): {"loss": "a"}, (0, 2): {"loss": "b", "state.model.w": "c", **moments}}
    return recorded


def test_equal_traces_have_no_difference_and_a_killed_one_is_shorter() -> None:
    shorter = trace()
    del shorter.steps[0, 2]
    assert find_difference(trace(), trace()) is None
    assert find_difference(trace(), shorter) is None


def test_first_path_of_the_first_step_is_named() -> None:
    other = trace(**{"state.model.w": "other", "metrics.x": "new"})
    assert find_difference(trace(), other) == Difference((0, 2), "state.model.w")


def test_state_that_is_not_restored_is_named_before_any_step() -> None:
    other = trace(**{"state.model.w": "other"})
    other.restored = ((0, 2), {"state.model.w": "wrong"})
    difference = find_difference(trace(), other)
    assert difference == Difference((0, 2), "state.model.w", is_restored=True)
    assert (difference.cause, difference.section) == (explain("restored"), "MODEL")


@pytest.mark.parametrize(
    ("path", "section"),
    [
        ("batch.0.input", "DATA"),
        ("output.0.0", "MODEL"),
        ("loss", "LOSS"),
        ("gradient.0.body.weight", "MODEL"),
        ("state.model.body.weight", "OPTIMIZER"),  # after an equal gradient
        ("state.updater.optimizer.0.momentum_buffer", "OPTIMIZER"),
        ("state.meter.accuracy.correct", "METERS.accuracy"),
        ("state.data.train.sampler", "DATA.TRAIN"),
        ("metrics.accuracy", "METERS.accuracy"),
        ("hooks.mine.steps", "HOOKS.mine"),
        ("logs.seconds", "TASK"),
    ],
)
def test_path_belongs_to_a_section(path: str, section: str) -> None:
    difference = Difference((0, 1), path)
    assert difference.section == section
    assert difference.cause


def ledger(*changes: dict[str, Any]) -> Ledger:
    """Return a ledger of some updates, each with its changes of `RECORD`."""
    records = [RECORD._replace(updates=n, **change) for n, change in enumerate(changes, 1)]
    return parse_ledger(encode_ledger(records))


@pytest.mark.parametrize(
    ("other", "components", "expected"),
    [
        (ledger({}, {}, {}), ("loss", "lr"), None),
        # The first update in both, causes before effects.
        (ledger({}, {"loss": 0.6, "lr": 0.2}, {"lr": 0.3}), ("loss", "lr"), (2, ("lr", "loss"))),
        (ledger({}, {"loss": 0.6}, {"lr": 0.3}), ("lr",), (3, ("lr",))),
        (ledger({"loss": -0.0}), ("loss", "lr"), (1, ("loss",))),
        (ledger({}), ("loss", "lr"), None),
    ],
)
def test_first_update_that_differs_is_found(
    other: Ledger, components: tuple[str, ...], expected: tuple[int, tuple[str, ...]] | None
) -> None:
    assert find_first_update(ledger({}, {}, {}), other, components) == expected


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
        (torch.arange(6).view(2, 3)[:1, 2], torch.tensor([2])),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        ({"a": (NAN, None, "x")}, OrderedDict(a=(NAN, None, "x"))),
        (np.float64(0.5), 0.5),
        (np.arange(3), np.arange(3)),
    ],
)
def test_equal_values_have_no_differences(one: Any, other: Any) -> None:
    assert differences(one, other) == []
    assert is_equal(one, other)
    assert digest_leaves(one, "a") == digest_leaves(other, "a")


@pytest.mark.parametrize(
    ("one", "other", "paths"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0), ["state"]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ["state"]),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), ["state"]),
        (torch.zeros(2, 3), torch.zeros(3, 2), ["state"]),
        (0.0, -0.0, ["state"]),
        (1, True, ["state"]),
        (1, 1.0, ["state"]),
        ((1,), [1], ["state"]),
        ([1], [1, 2], ["state"]),
        ({"a": 1, "b": [1, 2]}, {"b": [1, 3], "c": 1}, ["state.a", "state.c", "state.b.1"]),
        (np.arange(3), np.arange(3, dtype=np.int32), ["state"]),
        (np.arange(3), torch.arange(3), ["state"]),
        (torch.tensor(1), 1, ["state"]),
        (1.0, (1.0).hex(), ["state"]),
        (torch.ones(1), None, ["state"]),
    ],
)
def test_differing_paths_are_listed(one: Any, other: Any, paths: list[str]) -> None:
    assert differences(one, other) == paths
    assert not is_equal(one, other)


@pytest.mark.parametrize(
    ("tensor", "other", "changed"),
    [
        (torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 1.0]), 1),
        (torch.ones(2, 3).t(), torch.ones(3, 2), 0),
        (torch.tensor([1 + 2j, 3]), torch.tensor([1 + 3j, 3]), 1),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), 2),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), 3),
        (torch.ones(0), torch.ones(0, 2), 1),
    ],
)
def test_entries_with_other_bits_are_counted(
    tensor: torch.Tensor, other: torch.Tensor, changed: int
) -> None:
    assert count_changed(tensor, other) == changed
    assert is_equal(tensor, other) is not bool(changed)
